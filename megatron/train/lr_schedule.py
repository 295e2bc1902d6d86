"""Learning rate and weight decay as functions of how much was trained.

Time is counted in *samples*, as in Megatron: a schedule given in iterations is multiplied by the global
batch size once, so that a run keeps its schedule when the number of ranks changes. The formulas are
megatron-core's (``megatron/core/optimizer_param_scheduler.py``), which the tests use as an independent
witness; the decay shapes go back to https://openreview.net/pdf?id=BJYwwY9ll (page 4), WSD to
https://arxiv.org/abs/2404.06395.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol

DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")

# Share of (max - min) that is left when the fraction `ratio` of the decay has passed.
_DECAY_COEFFICIENTS: dict[str, Callable[[float], float]] = {
    "linear": lambda ratio: 1.0 - ratio,
    "cosine": lambda ratio: 0.5 * (math.cos(math.pi * ratio) + 1.0),
    "exponential": lambda ratio: 2.0 * math.pow(0.5, ratio) - 1.0,
    "minus_sqrt": lambda ratio: 1.0 - math.sqrt(ratio),
}
WSD_DECAY_STYLES = tuple(_DECAY_COEFFICIENTS)

# Share of (end - start) that has been added when the fraction `ratio` of the increase has passed.
_INCREASE_COEFFICIENTS: dict[str, Callable[[float], float]] = {
    "linear": lambda ratio: ratio,
    "cosine": lambda ratio: 0.5 * (math.cos(math.pi * (1.0 - ratio)) + 1.0),
}
WEIGHT_DECAY_STYLES = ("constant", *_INCREASE_COEFFICIENTS)


class HasParamGroups(Protocol):
    """What the scheduler needs of an optimizer."""

    param_groups: list[dict[str, Any]]


@dataclass(frozen=True)
class ScheduleConfig:
    """The two schedules of a run; every ``*_samples`` counts training samples (warm-up may be fractional)."""

    max_lr: float
    min_lr: float = 0.0
    init_lr: float = 0.0
    warmup_samples: float = 0
    decay_samples: int = 1
    decay_style: str = "linear"
    wsd_decay_samples: int | None = None
    wsd_decay_style: str = "exponential"
    start_weight_decay: float = 0.0
    end_weight_decay: float = 0.0
    weight_decay_samples: int = 1
    weight_decay_style: str = "constant"

    def __post_init__(self) -> None:
        _check_learning_rate(self)
        _check_weight_decay(self)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _check_learning_rate(config: ScheduleConfig) -> None:
    _require(
        config.decay_style in DECAY_STYLES,
        f"--lr-decay-style {config.decay_style!r} is unknown; use one of {', '.join(DECAY_STYLES)}",
    )
    _require(config.min_lr >= 0, f"--min-lr {config.min_lr} is negative; use 0 or more")
    _require(
        config.max_lr >= config.min_lr,
        f"--lr {config.max_lr} is below --min-lr {config.min_lr}; raise --lr or lower --min-lr",
    )
    _require(
        config.init_lr <= config.max_lr,
        f"--lr-warmup-init {config.init_lr} is above --lr {config.max_lr}; start at or below --lr",
    )
    _require(
        config.decay_samples > 0,
        f"the learning rate decays over {config.decay_samples} samples; give --train-iters, --train-samples, "
        "--lr-decay-iters or --lr-decay-samples above 0",
    )
    _require(
        config.warmup_samples < config.decay_samples,
        f"warm-up takes {config.warmup_samples:g} samples but the schedule has only {config.decay_samples}; "
        "lower --lr-warmup-iters, --lr-warmup-samples or --lr-warmup-fraction",
    )
    if config.decay_style != "WSD":
        return
    _require(
        config.wsd_decay_samples is not None and config.wsd_decay_samples > 0,
        "--lr-decay-style WSD needs the length of its last phase; add --lr-wsd-decay-iters or "
        "--lr-wsd-decay-samples",
    )
    _require(
        config.wsd_decay_style in WSD_DECAY_STYLES,
        f"--lr-wsd-decay-style {config.wsd_decay_style!r} is unknown; use one of "
        f"{', '.join(WSD_DECAY_STYLES)}",
    )


def _check_weight_decay(config: ScheduleConfig) -> None:
    style = config.weight_decay_style
    start, end = config.start_weight_decay, config.end_weight_decay
    _require(
        style in WEIGHT_DECAY_STYLES,
        f"--weight-decay-incr-style {style!r} is unknown; use one of {', '.join(WEIGHT_DECAY_STYLES)}",
    )
    _require(start >= 0, f"--start-weight-decay {start} is negative; use 0 or more")
    _require(
        end >= start,
        f"--end-weight-decay {end} is below --start-weight-decay {start}; weight decay only grows",
    )
    _require(
        style != "constant" or start == end,
        f"--start-weight-decay {start} and --end-weight-decay {end} differ; add --weight-decay-incr-style "
        "linear or cosine",
    )
    _require(
        config.weight_decay_samples > 0,
        f"weight decay grows over {config.weight_decay_samples} samples; give --train-iters or "
        "--train-samples above 0",
    )


def learning_rate(
    config: ScheduleConfig, samples: int, max_lr: float | None = None, min_lr: float | None = None
) -> float:
    """The learning rate after `samples` training samples.

    Args:
        config: the schedule.
        samples: training samples seen so far.
        max_lr, min_lr: a parameter group's own limits in place of the config's.
    """
    max_lr = config.max_lr if max_lr is None else max_lr
    min_lr = config.min_lr if min_lr is None else min_lr
    warmup = config.warmup_samples
    if warmup > 0 and samples <= warmup:
        return config.init_lr + (max_lr - config.init_lr) * float(samples) / float(warmup)
    if config.decay_style == "constant":
        return max_lr
    if samples > config.decay_samples:
        return min_lr
    if config.decay_style == "inverse-square-root":
        return max(min_lr, max_lr * max(warmup, 1) ** 0.5 / max(samples, 1) ** 0.5)
    if config.decay_style == "WSD":
        coefficient = _wsd_coefficient(config, samples)
    else:
        ratio = float(samples - warmup) / float(config.decay_samples - warmup)
        coefficient = _DECAY_COEFFICIENTS[config.decay_style](ratio)
    return min_lr + coefficient * (max_lr - min_lr)


def _wsd_coefficient(config: ScheduleConfig, samples: int) -> float:
    """Stable at 1, then down over the last `wsd_decay_samples`."""
    assert config.wsd_decay_samples is not None
    anneal_start = config.decay_samples - config.wsd_decay_samples
    if samples <= anneal_start:
        return 1.0
    return _DECAY_COEFFICIENTS[config.wsd_decay_style](
        float(samples - anneal_start) / config.wsd_decay_samples
    )


def weight_decay(config: ScheduleConfig, samples: int) -> float:
    """The weight decay after `samples` training samples, before a group's own multiplier."""
    if config.weight_decay_style == "constant" or samples > config.weight_decay_samples:
        return config.end_weight_decay
    coefficient = _INCREASE_COEFFICIENTS[config.weight_decay_style](samples / config.weight_decay_samples)
    return config.start_weight_decay + coefficient * (config.end_weight_decay - config.start_weight_decay)


class OptimizerParamScheduler:
    """Writes ``lr`` and ``weight_decay`` into an optimizer's groups.

    A group may carry ``max_lr`` and ``min_lr`` in place of the config's, and ``lr_mult`` and ``wd_mult``,
    which multiply the result (1 where absent).
    """

    def __init__(self, optimizer: HasParamGroups, config: ScheduleConfig) -> None:
        self.optimizer = optimizer
        self.config = config
        self.num_samples = 0
        self.step(0)

    def step(self, increment: int) -> None:
        """Advance by `increment` samples and set every group's values."""
        self.num_samples += increment
        base_weight_decay = weight_decay(self.config, self.num_samples)
        for group in self.optimizer.param_groups:
            rate = learning_rate(self.config, self.num_samples, group.get("max_lr"), group.get("min_lr"))
            _assign(group, "lr", rate * group.get("lr_mult", 1.0))
            _assign(group, "weight_decay", base_weight_decay * group.get("wd_mult", 1.0))

    @property
    def lr(self) -> float:
        """The learning rate of a group without limits or multiplier of its own: the one to log."""
        return learning_rate(self.config, self.num_samples)

    def state_dict(self) -> dict[str, Any]:
        """What a resume needs: the position and the schedule it belongs to."""
        return {"num_samples": self.num_samples, "config": asdict(self.config)}

    def load_state_dict(
        self, state: dict[str, Any], *, override: bool = False, use_checkpoint: bool = False
    ) -> None:
        """Take the position of a checkpoint, and check that it belongs to the same schedule.

        Args:
            state: from `state_dict`.
            override: keep this run's schedule where the two differ (``--override-opt-param-scheduler``).
            use_checkpoint: take the checkpoint's schedule (``--use-checkpoint-opt-param-scheduler``).

        Raises:
            ValueError: if the schedules differ and no flag says whose to use; all differences are listed.
        """
        _require(
            not (override and use_checkpoint),
            "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler contradict each other; "
            "drop one",
        )
        known = {field.name for field in fields(ScheduleConfig)}
        saved = ScheduleConfig(**{name: value for name, value in state["config"].items() if name in known})
        if use_checkpoint:
            self.config = saved
        elif not override and saved != self.config:
            raise ValueError(_describe_differences(saved, self.config))
        self.num_samples = 0
        self.step(state["num_samples"])


def _assign(group: dict[str, Any], key: str, value: float) -> None:
    """Set a group's value; capturable optimizers keep it in a tensor, which must stay the same object."""
    current: Any = group.get(key)
    if hasattr(current, "fill_"):
        current.fill_(value)
    else:
        group[key] = value


def _describe_differences(saved: ScheduleConfig, own: ScheduleConfig) -> str:
    differences = [
        f"{field.name} {getattr(saved, field.name)} in the checkpoint, {getattr(own, field.name)} here"
        for field in fields(ScheduleConfig)
        if getattr(saved, field.name) != getattr(own, field.name)
    ]
    return (
        f"the checkpoint's learning-rate schedule differs ({'; '.join(differences)}); add "
        "--override-opt-param-scheduler to use this run's or --use-checkpoint-opt-param-scheduler to use the "
        "checkpoint's"
    )


def schedule_from_config(config: Any) -> ScheduleConfig:
    """The schedule that a validated training config asks for (Megatron's names and rules).

    ``train_samples`` where given decides, else ``train_iters``; what is absent follows the run's length.
    """
    batch = config.global_batch_size
    if config.train_samples:
        decay = config.lr_decay_samples or config.train_samples
        wsd_decay = config.lr_wsd_decay_samples
        warmup = config.lr_warmup_samples
        total = config.train_samples
    else:
        decay = (config.lr_decay_iters or config.train_iters) * batch
        wsd_decay = None if config.lr_wsd_decay_iters is None else config.lr_wsd_decay_iters * batch
        warmup = config.lr_warmup_iters * batch
        total = config.train_iters * batch
    if config.lr_warmup_fraction is not None:
        warmup = config.lr_warmup_fraction * decay
    start = config.weight_decay if config.start_weight_decay is None else config.start_weight_decay
    end = config.weight_decay if config.end_weight_decay is None else config.end_weight_decay
    return ScheduleConfig(
        max_lr=config.lr,
        min_lr=config.min_lr or 0.0,
        init_lr=config.lr_warmup_init,
        warmup_samples=warmup,
        decay_samples=decay,
        decay_style=config.lr_decay_style,
        wsd_decay_samples=wsd_decay,
        wsd_decay_style=config.lr_wsd_decay_style,
        start_weight_decay=start,
        end_weight_decay=end,
        weight_decay_samples=total,
        weight_decay_style=config.weight_decay_incr_style,
    )
