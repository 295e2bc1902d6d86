"""What DeepSeek-V3 has beside experts: latent attention, YaRN, multi-token prediction.

https://arxiv.org/abs/2412.19437. Frozen and validated. Field names are Megatron's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class YarnConfig:
    """YaRN's stretching of rotary positions (https://arxiv.org/abs/2309.00071).

    Attributes:
        scaling_factor: how many times longer than `original_max_position` sequences may be; 1 changes nothing.
        original_max_position: length before.
        beta_fast, beta_slow: full turns within that length from which frequencies are kept, up to which divided.
        mscale, mscale_all_dim: of the attention's temperature (`mscale_of`).
        round_to_int: the first and last channel between the two betas are whole numbers.
    """

    scaling_factor: float = 1.0
    original_max_position: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    round_to_int: bool = True

    def __post_init__(self) -> None:
        if not self.scaling_factor >= 1.0:
            raise ValueError(f"--rotary-scaling-factor {self.scaling_factor}: give a number of at least 1")
        if self.original_max_position < 1:
            raise ValueError(
                f"--yarn-original-max-position-embeddings {self.original_max_position}: give 1 or more"
            )
        if not self.beta_fast > self.beta_slow > 0:
            raise ValueError(
                f"--yarn-beta-fast {self.beta_fast} must be above --yarn-beta-slow {self.beta_slow}, both above 0"
            )

    def mscale_of(self, weight: float) -> float:
        """0.1 weight ln(factor) + 1."""
        return 1.0 if self.scaling_factor <= 1.0 else 0.1 * weight * math.log(self.scaling_factor) + 1.0

    @property
    def concentration(self) -> float:
        """What cosines and sines are multiplied by."""
        return self.mscale_of(self.mscale) / self.mscale_of(self.mscale_all_dim)


@dataclass(frozen=True)
class MLAConfig:
    """Multi-latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1).

    Attributes:
        q_lora_rank: width of the queries' latent; None: queries are projected at once.
        kv_lora_rank: width of the latent of keys and values.
        qk_head_dim: channels of a head without positions.
        qk_pos_emb_head_dim: channels of a head that turn; of the key they are one for all heads.
        v_head_dim: channels of a value head.
    """

    q_lora_rank: int | None = None
    kv_lora_rank: int = 32
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128

    def __post_init__(self) -> None:
        for name in ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"):
            value = getattr(self, name)
            if value is None and name == "q_lora_rank":
                continue
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"--{name.replace('_', '-')} {value}: give 1 or more")
        if self.qk_pos_emb_head_dim % 2:
            raise ValueError(
                f"--qk-pos-emb-head-dim {self.qk_pos_emb_head_dim}: rotation needs an even number"
            )

    @property
    def query_head_dim(self) -> int:
        """Channels of a query or key head."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim

    @classmethod
    def from_arguments(cls, arguments: Any) -> MLAConfig | None:
        """What a namespace with Megatron's names describes; None without --multi-latent-attention."""
        return _of(cls, arguments) if getattr(arguments, "multi_latent_attention", False) else None


@dataclass(frozen=True)
class MTPConfig:
    """Multi-token prediction (DeepSeek-V3, section 2.2): layers that predict the tokens after the next one.

    Attributes:
        num_layers: how many further tokens. loss_scaling_factor: weight of the mean of their losses.
        use_repeated_layer: one layer predicts them all, one after the other.
        detach_heads: the losses do not reach the model's hidden states, only these layers, embedding and head.
    """

    num_layers: int
    loss_scaling_factor: float = 0.1
    use_repeated_layer: bool = False
    detach_heads: bool = False

    def __post_init__(self) -> None:
        if self.num_layers < 1:
            raise ValueError(f"--mtp-num-layers {self.num_layers}: give 1 or more, or leave it out")
        if self.loss_scaling_factor < 0:
            raise ValueError(f"--mtp-loss-scaling-factor {self.loss_scaling_factor}: give a number >= 0")

    @classmethod
    def from_arguments(cls, arguments: Any) -> MTPConfig | None:
        """What a namespace with Megatron's names describes; None without --mtp-num-layers."""
        layers = getattr(arguments, "mtp_num_layers", None)
        if not layers:
            return None
        factor = getattr(arguments, "mtp_loss_scaling_factor", None)
        return cls(
            layers,
            cls.loss_scaling_factor if factor is None else factor,
            getattr(arguments, "mtp_use_repeated_layer", False),
            getattr(arguments, "mtp_detach_heads", False),
        )

    @property
    def built_layers(self) -> int:
        """Layers that exist."""
        return 1 if self.use_repeated_layer else self.num_layers


def yarn_from_arguments(arguments: Any) -> YarnConfig | None:
    """YaRN, which latent attention takes unless --rope-type rope says otherwise; None: plain rotary positions."""
    latent = getattr(arguments, "multi_latent_attention", False)
    kind = getattr(arguments, "rope_type", None) or ("yarn" if latent else "rope")
    if kind != "yarn":
        return None
    names = {
        "scaling_factor": "rotary_scaling_factor",
        "original_max_position": "yarn_original_max_position_embeddings",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
        "round_to_int": "yarn_correction_range_round_to_int",
    }
    given = {field: getattr(arguments, name, None) for field, name in names.items()}
    return YarnConfig(**{field: value for field, value in given.items() if value is not None})


def _of(cls: Any, arguments: Any) -> Any:
    given = {name: getattr(arguments, name, None) for name in cls.__dataclass_fields__}
    return cls(**{name: value for name, value in given.items() if value is not None})
