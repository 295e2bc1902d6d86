"""What a model is: frozen, validated, without a word about devices, groups or training.

Field names are the destinations of Megatron's flags (``--norm-epsilon`` -> ``layernorm_epsilon``), so that
`ModelConfig.from_arguments` is a copy of attributes plus the few derivations that Megatron makes.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from megatron.models.deepseek import MLAConfig, MTPConfig
from megatron.models.init import InitSpec
from megatron.models.moe.config import MoEConfig
from megatron.models.offload import OffloadConfig
from megatron.models.recompute import RecomputeConfig, recompute_from_arguments
from megatron.models.rotary import RotaryConfig, positive, rotary_from_arguments
from megatron.models.variants import Variants

ACTIVATIONS = ("gelu", "gelu_tanh", "silu", "squared_relu", "quick_gelu", "relu")
POSITION_EMBEDDINGS = ("learned_absolute", "rope", "none")
NORMALIZATIONS = ("LayerNorm", "RMSNorm")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer. Invalid or contradictory values are a ValueError that names the flag.

    Fields that may be left None are never None after construction.

    Attributes:
        vocab_size: true size of the vocabulary.
        padded_vocab_size: rows of the embedding; those after vocab_size are zero and never predicted.
            None: no padding.
        ffn_hidden_size: None: 4 x hidden, with SwiGLU 8/3 x hidden rounded down to a multiple of 64, as in
            Megatron.
        num_query_groups: key and value heads. None: as many as query heads.
        kv_channels: channels of a head. None: hidden / heads.
        glu_linear_offset: added to the linear half of a gated MLP.
        embedding_init_method_std: None: init_method_std.
        cp_comm_type: how attention communicates over the context axis: one for all layers, or one for each.
        hierarchical_context_parallel_sizes: of a2a+p2p: ranks of the all-to-all, ranks of the ring.
        moe: experts in place of (some) MLPs. mla: latent attention in place of the usual one. mtp: multi-token
            prediction. None: without.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    vocab_size: int
    max_position_embeddings: int
    ffn_hidden_size: int = None  # type: ignore[assignment]
    num_query_groups: int = None  # type: ignore[assignment]
    kv_channels: int = None  # type: ignore[assignment]
    padded_vocab_size: int = None  # type: ignore[assignment]
    position_embedding_type: str = "learned_absolute"
    rotary: RotaryConfig = field(default_factory=RotaryConfig)
    normalization: str = "LayerNorm"
    layernorm_epsilon: float = 1e-5
    layernorm_zero_centered_gamma: bool = False
    qk_layernorm: bool = False
    activation: str = "gelu"
    gated_linear_unit: bool = False
    activation_func_clamp_value: float | None = None
    glu_linear_offset: float = 0.0
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    attention_dropout: float = 0.1
    hidden_dropout: float = 0.1
    softmax_scale: float | None = None
    untie_embeddings_and_output_weights: bool = False
    fp32_residual_connection: bool = False
    init_method_std: float = 0.02
    embedding_init_method_std: float = None  # type: ignore[assignment]
    init_method_xavier_uniform: bool = False
    cp_comm_type: tuple[str, ...] = ("p2p",)
    hierarchical_context_parallel_sizes: tuple[int, ...] | None = None
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    variants: Variants = field(default_factory=Variants)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    moe: MoEConfig | None = None
    mla: MLAConfig | None = None
    mtp: MTPConfig | None = None

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "hidden_size",
            "num_attention_heads",
            "vocab_size",
            "max_position_embeddings",
        ):
            positive(_flag(name), getattr(self, name))
        self._derive()
        for name in ("ffn_hidden_size", "num_query_groups", "kv_channels", "layernorm_epsilon"):
            positive(_flag(name), getattr(self, name))
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"--num-query-groups {self.num_query_groups} must divide "
                f"--num-attention-heads {self.num_attention_heads}"
            )
        if self.padded_vocab_size < self.vocab_size:
            raise ValueError(
                f"--padded-vocab-size {self.padded_vocab_size} is smaller than --vocab-size {self.vocab_size}"
            )
        _one_of("--position-embedding-type", self.position_embedding_type, POSITION_EMBEDDINGS)
        _one_of("--normalization", self.normalization, NORMALIZATIONS)
        _one_of("activation", self.activation, ACTIVATIONS)
        for name in ("attention_dropout", "hidden_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{_flag(name)} {getattr(self, name)}: give a probability in [0, 1)")
        for name in ("init_method_std", "embedding_init_method_std"):
            if getattr(self, name) < 0:
                raise ValueError(f"{_flag(name)} {getattr(self, name)}: give a number >= 0")
        if self.position_embedding_type == "rope" and self.rotary_dim % 2:
            raise ValueError(
                f"--rotary-percent {self.rotary.percent} of a head of {self.kv_channels} channels turns "
                f"{self.rotary_dim} of them, but rotation needs pairs: choose an even number"
            )
        self._check_parts()
        if len(self.cp_comm_type) not in (1, self.num_layers):
            raise ValueError(
                f"--cp-comm-type has {len(self.cp_comm_type)} values: give one, or one for each of the "
                f"{self.num_layers} layers"
            )

    def _check_parts(self) -> None:
        experts = self.moe is not None and any(self.moe.pattern)
        shared = self.moe is not None and self.moe.shared_expert_intermediate_size is not None
        self.recompute.check(
            latent=self.mla is not None,
            experts=experts,
            shared=experts and shared,
            residual_from_norm=self.variants.residual_post_layernorm,
        )
        if self.moe is not None and len(self.moe.pattern) != self.num_layers:
            raise ValueError(
                f"--moe-layer-freq describes {len(self.moe.pattern)} layers, but --num-layers is "
                f"{self.num_layers}: make them equal"
            )
        if self.mla is not None and self.position_embedding_type != "rope":
            raise ValueError(
                f"--multi-latent-attention with --position-embedding-type {self.position_embedding_type}: use rope"
            )
        if self.mla is not None and self.num_query_groups != self.num_attention_heads:
            raise ValueError(
                f"--multi-latent-attention has no query groups: drop --num-query-groups {self.num_query_groups}"
            )
        if self.mla is not None and (
            self.variants.output_gate or self.variants.qk_l2_norm or self.variants.without_rope
        ):
            raise ValueError(
                "--multi-latent-attention has no --attention-output-gate, --qk-l2-norm or --no-rope-freq: drop them"
            )
        if self.mtp is not None and self.position_embedding_type == "learned_absolute":
            raise ValueError("--mtp-num-layers needs --position-embedding-type rope or none")
        if self.mtp is not None and self.mtp.num_layers >= self.max_position_embeddings:
            raise ValueError(
                f"--mtp-num-layers {self.mtp.num_layers} looks past the end of sequences of "
                f"{self.max_position_embeddings} tokens: lower it"
            )

    def _derive(self) -> None:
        """Fill the fields that were left None (the only writes to a frozen config, before anybody sees
        it).
        """
        derived: dict[str, Any] = {}
        if self.ffn_hidden_size is None:
            swiglu = self.gated_linear_unit and self.activation == "silu"
            derived["ffn_hidden_size"] = (
                int(4 * self.hidden_size * 2 / 3 / 64) * 64 if swiglu else 4 * self.hidden_size
            )
        if self.num_query_groups is None:
            derived["num_query_groups"] = self.num_attention_heads
        if self.kv_channels is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"--hidden-size {self.hidden_size} is not a multiple of --num-attention-heads "
                    f"{self.num_attention_heads}: change one of them or give --kv-channels"
                )
            derived["kv_channels"] = self.hidden_size // self.num_attention_heads
        if self.padded_vocab_size is None:
            derived["padded_vocab_size"] = self.vocab_size
        if self.embedding_init_method_std is None:
            derived["embedding_init_method_std"] = self.init_method_std
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @property
    def query_projection_size(self) -> int:
        """Channels of all query heads together."""
        return self.kv_channels * self.num_attention_heads

    @property
    def qkv_projection_size(self) -> int:
        """Rows of the fused query, key and value projection."""
        queries = self.query_projection_size * (2 if self.variants.output_gate else 1)
        return queries + 2 * self.kv_channels * self.num_query_groups

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that rotary positions turn."""
        if self.mla is not None:
            return self.mla.qk_pos_emb_head_dim
        return int(self.kv_channels * self.rotary.percent)

    @property
    def qkv_bias(self) -> bool:
        """Whether the fused qkv projection has a bias."""
        return self.add_bias_linear or self.add_qkv_bias

    @property
    def output_init_std(self) -> float:
        """Standard deviation of what writes to the residual stream: std / sqrt(2 layers), as in GPT-2."""
        return self.init_method_std / math.sqrt(2.0 * self.num_layers)

    @property
    def attention_scale(self) -> float | None:
        """Factor of attention scores; None: 1 / sqrt(head dim)."""
        mup = self.variants.mup
        return self.softmax_scale if mup is None else mup.softmax_scale(self.kv_channels)

    @property
    def norm_options(self) -> dict[str, Any]:
        """Keyword arguments of a backend's LayerNormLinear that describe its norm."""
        return {
            "normalization": self.normalization,
            "eps": self.layernorm_epsilon,
            "zero_centered_gamma": self.layernorm_zero_centered_gamma,
        }

    def linear_init(self, fan_in: int, fan_out: int, *, writes_residual: bool = False) -> InitSpec:
        """Initial distribution of a linear weight.

        Xavier takes the global fans, so that it does not depend on tensor parallelism.
        """
        if self.init_method_xavier_uniform:
            return InitSpec("uniform", math.sqrt(2.0 / (fan_in + fan_out)))
        std = self.output_init_std if writes_residual else self.init_method_std
        mup = self.variants.mup
        return InitSpec("normal", std if mup is None else std / math.sqrt(mup.width_mult))

    def replace(self, **changes: Any) -> ModelConfig:
        """A copy with other values, validated again."""
        return dataclasses.replace(self, **changes)

    @classmethod
    def from_arguments(cls, arguments: Any) -> ModelConfig:
        """The model that a namespace with Megatron's argument names describes.

        Missing attributes take the defaults of this class (Megatron's). `vocab_size` must be there: the
        tokenizer's size unless ``--vocab-size`` was given.
        """
        given = {
            item.name: getattr(arguments, item.name)
            for item in dataclasses.fields(cls)
            if getattr(arguments, item.name, None) is not None
        }
        for name in (
            "num_layers",
            "hidden_size",
            "num_attention_heads",
            "vocab_size",
            "max_position_embeddings",
        ):
            if name not in given:
                raise ValueError(f"{_flag(name)} is missing: a model cannot be built without it")
        if not getattr(arguments, "group_query_attention", False):
            given["num_query_groups"] = None
        for name in ("cp_comm_type", "hierarchical_context_parallel_sizes"):
            if name in given:
                given[name] = tuple(given[name])
        given["activation"], given["gated_linear_unit"] = _activation_of(arguments)
        given["rotary"] = rotary_from_arguments(arguments)
        given["recompute"] = recompute_from_arguments(arguments)
        if getattr(arguments, "use_rotary_position_embeddings", False):
            given["position_embedding_type"] = "rope"
        if not getattr(arguments, "add_position_embedding", True):
            given["position_embedding_type"] = (
                "rope" if given.get("position_embedding_type") == "rope" else "none"
            )
        given["offload"] = OffloadConfig.from_arguments(arguments)
        given["variants"] = Variants.from_arguments(arguments, given["num_layers"])
        given["moe"] = MoEConfig.from_arguments(
            arguments, given["num_layers"], given.get("ffn_hidden_size", 4 * given["hidden_size"])
        )
        given["mla"], given["mtp"] = MLAConfig.from_arguments(arguments), MTPConfig.from_arguments(arguments)
        return cls(**given)


def _activation_of(arguments: Any) -> tuple[str, bool]:
    names = ("swiglu", "squared_relu", "quick_geglu", "openai_gelu")
    chosen = [name for name in names if getattr(arguments, name, False)]
    if len(chosen) > 1:
        raise ValueError(f"{' and '.join(map(_flag, chosen))} exclude each other: choose one activation")
    table = {
        "swiglu": ("silu", True),
        "squared_relu": ("squared_relu", False),
        "quick_geglu": ("quick_gelu", True),
        "openai_gelu": ("gelu_tanh", False),
    }
    return table[chosen[0]] if chosen else ("gelu", False)


def _flag(name: str) -> str:
    return {"layernorm_epsilon": "--norm-epsilon"}.get(name, "--" + name.replace("_", "-"))


def _one_of(flag: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        names = ", ".join("unset" if item is None else str(item) for item in allowed)
        raise ValueError(f"{flag} {value}: choose one of {names}")
