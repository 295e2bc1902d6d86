"""Which rotary positions a model has: frozen, validated. Field names follow Megatron's flags."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megatron.models.deepseek import YarnConfig, yarn_from_arguments


@dataclass(frozen=True)
class RotaryConfig:
    """Rotary positions (https://arxiv.org/abs/2104.09864).

    Attributes:
        base: the longest wavelength is about 2 pi times this many positions.
        percent: the part of each head that turns.
        interleaved: pairs of channels are (0, 1), (2, 3).. rather than (0, d/2), (1, d/2 + 1)..
        seq_len_interpolation_factor: positions are divided by it (https://arxiv.org/abs/2306.15595).
        scaling_factor: of Llama 3.1's frequency scaling; None: off.
        original_max_position: the length before that scaling.
        yarn: YaRN's stretching instead.
    """

    base: float = 10000.0
    percent: float = 1.0
    interleaved: bool = False
    seq_len_interpolation_factor: float | None = None
    scaling_factor: float | None = None
    original_max_position: int = 8192
    yarn: YarnConfig | None = None

    def __post_init__(self) -> None:
        positive("--rotary-base", self.base)
        if not 0.0 < self.percent <= 1.0:
            raise ValueError(f"--rotary-percent {self.percent}: give a number in (0, 1]")
        if self.seq_len_interpolation_factor is not None:
            positive("--rotary-seq-len-interpolation-factor", self.seq_len_interpolation_factor)
        if self.scaling_factor is not None:
            positive("--rope-scaling-factor", self.scaling_factor)
            if self.yarn is not None:
                raise ValueError(
                    "--use-rope-scaling with YaRN (--rope-type yarn, latent attention's default): drop it"
                )


def rotary_from_arguments(arguments: Any) -> RotaryConfig:
    """What a namespace with Megatron's names describes."""
    defaults = RotaryConfig()
    scaled = getattr(arguments, "use_rope_scaling", False)
    return RotaryConfig(
        base=getattr(arguments, "rotary_base", defaults.base),
        percent=getattr(arguments, "rotary_percent", defaults.percent),
        interleaved=getattr(arguments, "rotary_interleaved", defaults.interleaved),
        seq_len_interpolation_factor=getattr(arguments, "rotary_seq_len_interpolation_factor", None),
        scaling_factor=getattr(arguments, "rope_scaling_factor", 8.0) if scaled else None,
        yarn=yarn_from_arguments(arguments),
    )


def positive(flag: str, value: float) -> None:
    """Raise ValueError, naming the flag, for what is no finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0 or math.isinf(value):
        raise ValueError(f"{flag} {value!r}: give a number > 0")
