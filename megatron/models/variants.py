"""Variants of attention and of the residual stream that some models have: frozen, validated.

Windows (Longformer, https://arxiv.org/abs/2004.05150), sinks (https://arxiv.org/abs/2309.17453), gates on the output
(https://arxiv.org/abs/2505.06708), layers without positions (https://arxiv.org/abs/2305.19466), norms of queries and
keys without weights, and muP (https://arxiv.org/abs/2203.03466). Field names are the destinations of Megatron's flags.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")


@dataclass(frozen=True)
class MuPConfig:
    """Maximal update parametrisation: hyperparameters of a narrow model hold for a wide one.

    With m = hidden size / `base_hidden_size`: hidden matrices start with standard deviation / sqrt(m), Adam's
    learning rate of them is / m, logits are x output_mult / m, embeddings x embedding_mult.

    Attributes:
        width_mult: m.
        embedding_mult, output_mult: tuned on the narrow model.
        attn_scale_power, base_head_dim: the softmax scale is base^(power - 1/2) / head_dim^power, so that it is the
            usual one at the base width.
    """

    width_mult: float
    embedding_mult: float = 1.0
    output_mult: float = 1.0
    attn_scale_power: float = 1.0
    base_head_dim: float | None = None

    def __post_init__(self) -> None:
        if not self.width_mult > 0:
            raise ValueError(
                f"--mup-base-hidden-size gives a width multiplier of {self.width_mult}: give 1 or more"
            )
        if self.base_head_dim is not None and not self.base_head_dim > 0:
            raise ValueError(f"--mup-base-head-dim {self.base_head_dim}: give a number > 0")

    @property
    def logit_mult(self) -> float:
        """What logits are multiplied by."""
        return self.output_mult / self.width_mult

    def softmax_scale(self, head_dim: int) -> float:
        """The scale of attention scores of heads of `head_dim` channels."""
        base = self.base_head_dim or 1.0
        power = self.attn_scale_power
        return (
            float(base ** (power - 0.5) / head_dim**power) if self.base_head_dim else float(head_dim**-power)
        )

    @classmethod
    def from_arguments(cls, arguments: Any) -> MuPConfig | None:
        """None without --use-mup. --mup-width-mult counts where no base size is given."""
        if not getattr(arguments, "use_mup", False):
            return None
        base = getattr(arguments, "mup_base_hidden_size", None)
        width = arguments.hidden_size / base if base else getattr(arguments, "mup_width_mult", 1.0)
        return cls(
            width_mult=width,
            embedding_mult=getattr(arguments, "mup_embedding_mult", 1.0),
            output_mult=getattr(arguments, "mup_output_mult", 1.0),
            attn_scale_power=getattr(arguments, "mup_attn_scale_power", 1.0),
            base_head_dim=getattr(arguments, "mup_base_head_dim", None),
        )


@dataclass(frozen=True)
class Variants:
    """What a layer does otherwise than the usual one.

    Attributes:
        window_size: (left, right) tokens that a query sees beside its own; causal attention sees none to the right.
        windowed: whether each layer has the window.
        softmax_type: "off-by-one" adds one to the sum of exponentials, "learnable" the exponential of a number of
            each head, so that a head may attend to nothing.
        output_gate: attention's output is multiplied by the sigmoid of a projection.
        qk_l2_norm: queries and keys of each head are divided by their root mean square.
        without_rope: whether each layer has no rotary positions.
        residual_post_layernorm: the residual stream goes on from the norm's output, not from its input.
        mup: maximal update parametrisation, or None.
    """

    window_size: tuple[int, int] | None = None
    windowed: tuple[bool, ...] = ()
    softmax_type: str = "vanilla"
    output_gate: bool = False
    qk_l2_norm: bool = False
    without_rope: tuple[bool, ...] = ()
    residual_post_layernorm: bool = False
    mup: MuPConfig | None = None

    def __post_init__(self) -> None:
        if self.softmax_type not in SOFTMAX_TYPES:
            raise ValueError(f"--softmax-type {self.softmax_type}: choose one of {', '.join(SOFTMAX_TYPES)}")
        if self.window_size is not None and (len(self.window_size) != 2 or self.window_size[0] < 0):
            raise ValueError(
                f"--window-size {','.join(map(str, self.window_size))}: give LEFT,RIGHT such as 4096,0"
            )

    def window_of(self, layer_number: int) -> tuple[int, int] | None:
        """The window of the layer with this number (from 1), or None."""
        return self.window_size if not self.windowed or _at(self.windowed, layer_number) else None

    def has_rope(self, layer_number: int) -> bool:
        """Whether the layer with this number turns queries and keys."""
        return not (self.without_rope and _at(self.without_rope, layer_number))

    def attention_options(self, layer_number: int) -> dict[str, Any]:
        """Keyword arguments of a backend's DotProductAttention; none for the usual one."""
        options: dict[str, Any] = {}
        if self.window_of(layer_number) is not None:
            options["window_size"] = self.window_of(layer_number)
        if self.softmax_type != "vanilla":
            options["softmax_type"] = self.softmax_type
        return options

    @classmethod
    def from_arguments(cls, arguments: Any, num_layers: int) -> Variants:
        """The variants that a namespace with Megatron's names describes.

        --window-attn-skip-freq N: every N-th layer sees everything, or a list says which layers have the window.
        --no-rope-freq N: every N-th layer has no rotary positions, or a list says which.
        """
        window = getattr(arguments, "window_size", None)
        skip = getattr(arguments, "window_attn_skip_freq", None)
        windowed = [] if skip is None else _every(skip, num_layers, "--window-attn-skip-freq")
        if isinstance(skip, int):
            windowed = [not whole for whole in windowed]
        bare = getattr(arguments, "no_rope_freq", None)
        return cls(
            window_size=None if window is None else tuple(window),
            windowed=tuple(windowed) if window is not None else (),
            softmax_type=getattr(arguments, "softmax_type", "vanilla"),
            output_gate=getattr(arguments, "attention_output_gate", False),
            qk_l2_norm=getattr(arguments, "qk_l2_norm", False),
            without_rope=() if bare is None else tuple(_every(bare, num_layers, "--no-rope-freq")),
            residual_post_layernorm=getattr(arguments, "apply_residual_connection_post_layernorm", False),
            mup=MuPConfig.from_arguments(arguments),
        )


def _at(pattern: tuple[bool, ...], layer_number: int) -> bool:
    """Layers of multi-token prediction, which come after the last, are like the last."""
    return pattern[min(layer_number, len(pattern)) - 1]


def _every(frequency: Any, num_layers: int, flag: str) -> list[bool]:
    """Every n-th layer, or one 0 or 1 for each layer."""
    if isinstance(frequency, int):
        if frequency < 1:
            raise ValueError(f"{flag} {frequency}: give 1 or more, or a list of 0 and 1")
        return [(index + 1) % frequency == 0 for index in range(num_layers)]
    if len(frequency) != num_layers or any(item not in (0, 1) for item in frequency):
        raise ValueError(f"{flag} {list(frequency)}: give 0 or 1 for each of --num-layers {num_layers}")
    return [bool(item) for item in frequency]
