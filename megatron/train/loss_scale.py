"""Loss scaling for fp16: small gradients survive the format, and a scale that was too large is found and
lowered.

The rule is Megatron's (``megatron/core/optimizer/grad_scaler.py``): https://arxiv.org/abs/1710.03740,
section 3.2. bf16 and fp32 need no scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LossScaleConfig:
    """dynamic False: `initial` stays. window: clean steps before the scale doubles. hysteresis: overflows
    before it halves.
    """

    initial: float = 1.0
    dynamic: bool = False
    minimum: float = 1.0
    window: int = 1000
    hysteresis: int = 2
    growth_factor: float = 2.0
    backoff_factor: float = 0.5

    def __post_init__(self) -> None:
        if self.initial <= 0 or self.minimum <= 0:
            raise ValueError(
                f"--loss-scale, --initial-loss-scale and --min-loss-scale must be above 0, got {self}"
            )
        if self.dynamic and self.initial < self.minimum:
            raise ValueError(f"--initial-loss-scale {self.initial} is below --min-loss-scale {self.minimum}")


class LossScaler:
    """The present scale, and how overflows move it."""

    def __init__(self, config: LossScaleConfig) -> None:
        self.config = config
        self.scale = float(config.initial)
        self._growth_steps = 0
        self._hysteresis_left = config.hysteresis

    def update(self, overflow: bool) -> None:
        """Record one step; `overflow`: its gradients were not finite."""
        config = self.config
        if not config.dynamic:
            return
        if overflow:
            self._growth_steps = 0
            self._hysteresis_left -= 1
            if self._hysteresis_left <= 0:
                self.scale = max(self.scale * config.backoff_factor, config.minimum)
            return
        self._growth_steps += 1
        if self._growth_steps == config.window:
            self._growth_steps = 0
            self._hysteresis_left = config.hysteresis
            self.scale *= config.growth_factor

    def state_dict(self) -> dict[str, Any]:
        """What a resume needs."""
        return {
            "scale": self.scale,
            "growth_steps": self._growth_steps,
            "hysteresis_left": self._hysteresis_left,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved scale; a constant scale stays this run's own."""
        if self.config.dynamic:
            self.scale = state["scale"]
            self._growth_steps = state["growth_steps"]
            self._hysteresis_left = state["hysteresis_left"]


def loss_scaler_from_config(config: Any) -> LossScaler:
    """fp16: --loss-scale where given, else dynamic; other dtypes: 1."""
    if not config.fp16:
        return LossScaler(LossScaleConfig())
    if config.loss_scale is not None:
        return LossScaler(LossScaleConfig(initial=config.loss_scale))
    return LossScaler(
        LossScaleConfig(
            initial=config.initial_loss_scale,
            dynamic=True,
            minimum=config.min_loss_scale,
            window=int(config.loss_scale_window),
            hysteresis=config.hysteresis,
        )
    )
