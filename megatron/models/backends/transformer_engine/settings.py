"""What a user can choose of Transformer Engine beside the layers: attention kernels and FP8. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

ATTENTION_BACKENDS = {
    "auto": ("1", "1", "1"),
    "flash": ("1", "0", "0"),
    "fused": ("0", "1", "0"),
    "unfused": ("0", "0", "1"),
    "local": ("0", "0", "0"),
}
"""--attention-backend -> which of flash-attention, cuDNN's fused and the unfused attention TE may choose
from.
"""

ATTENTION_VARIABLES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
FP8_FORMATS = ("e4m3", "hybrid")
FP8_RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")


@dataclass(frozen=True)
class Fp8Settings:
    """FP8 training (--fp8-format and what belongs to it).

    Attributes:
        format: "e4m3", or "hybrid": E4M3 forward, E5M2 for gradients.
        recipe: how scales are found: "delayed" (from past maxima), "tensorwise" (current maximum),
        "blockwise"
            (128 x 128 and 1 x 128 blocks), "mxfp8" (blocks of 32, Blackwell).
        margin, amax_history_len, amax_compute_algo: of the delayed recipe.
        first_last_layers_bf16: the first and last layers compute in bf16.
        num_layers_at_start_in_bf16, num_layers_at_end_in_bf16: how many of them.
    """

    format: str = "hybrid"
    recipe: str = "delayed"
    margin: int = 0
    amax_history_len: int = 1
    amax_compute_algo: str = "most_recent"
    first_last_layers_bf16: bool = False
    num_layers_at_start_in_bf16: int = 1
    num_layers_at_end_in_bf16: int = 1

    def __post_init__(self) -> None:
        _one_of("--fp8-format", self.format, FP8_FORMATS)
        _one_of("--fp8-recipe", self.recipe, FP8_RECIPES)
        _one_of("--fp8-amax-compute-algo", self.amax_compute_algo, ("most_recent", "max"))
        for flag, value in (
            ("--num-layers-at-start-in-bf16", self.num_layers_at_start_in_bf16),
            ("--num-layers-at-end-in-bf16", self.num_layers_at_end_in_bf16),
        ):
            if value < 0:
                raise ValueError(f"{flag} {value}: give a number of layers, 0 or more")

    def recipe_of_layer(self, layer: int, num_layers: int) -> str | None:
        """Recipe of the layer with global index `layer`, None where it computes in bf16.

        As in Megatron-LM, layers of multi-token prediction (from num_layers on) are not among the last.
        """
        first = layer < self.num_layers_at_start_in_bf16
        last = num_layers - self.num_layers_at_end_in_bf16 <= layer < num_layers
        return None if self.first_last_layers_bf16 and (first or last) else self.recipe

    def describe(self) -> str:
        """The line that a run prints about FP8."""
        text = f"FP8: {self.format}, {self.recipe} scaling"
        if self.first_last_layers_bf16:
            first, last = self.num_layers_at_start_in_bf16, self.num_layers_at_end_in_bf16
            text += f"; the first {first} and last {last} layer(s) in the parameters' dtype"
        return text


@dataclass(frozen=True)
class EngineSettings:
    """Choices for the Transformer Engine backend.

    Attributes:
        attention_backend: a key of ATTENTION_BACKENDS; "local" takes the torch backend's attention inside a model
            whose other layers are TE's.
        fp8: None: layers compute in their parameters' dtype.
    """

    attention_backend: str = "auto"
    fp8: Fp8Settings | None = None

    def __post_init__(self) -> None:
        _one_of("--attention-backend", self.attention_backend, tuple(ATTENTION_BACKENDS))


def attention_environment(attention_backend: str) -> dict[str, str]:
    """Environment variables that make TE choose from the wanted attention kernels; to be set before its
    import.

    Raises ValueError on an unknown name.
    """
    _one_of("--attention-backend", attention_backend, tuple(ATTENTION_BACKENDS))
    return dict(zip(ATTENTION_VARIABLES, ATTENTION_BACKENDS[attention_backend], strict=True))


def describe_attention(attention_backend: str) -> str:
    """The line that a run prints about its choice of attention."""
    variables = attention_environment(attention_backend)
    if attention_backend == "local":
        return "attention: local (torch's, not Transformer Engine's)"
    allowed = [
        name
        for name, value in zip(("flash", "fused", "unfused"), variables.values(), strict=True)
        if value == "1"
    ]
    assignments = " ".join(f"{name}={value}" for name, value in variables.items())
    chooser = "Transformer Engine chooses from " if len(allowed) > 1 else "Transformer Engine's "
    return f"attention: {attention_backend}: {chooser}{', '.join(allowed)} ({assignments})"


def _one_of(flag: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{flag} {value!r}: choose from {', '.join(choices)}")
