"""The schedules against hand-computed values and against megatron-core's OptimizerParamScheduler."""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.train.lr_schedule import (
    DECAY_STYLES,
    WEIGHT_DECAY_STYLES,
    WSD_DECAY_STYLES,
    OptimizerParamScheduler,
    ScheduleConfig,
    learning_rate,
    schedule_from_config,
    weight_decay,
)

BASE = ScheduleConfig(max_lr=1.0, min_lr=0.1, warmup_samples=10, decay_samples=110, wsd_decay_samples=50)


def optimizer(**group: Any) -> SimpleNamespace:
    return SimpleNamespace(param_groups=[{"params": [], **group}])


@pytest.mark.parametrize(
    ("style", "samples", "expected"),
    [
        ("constant", 5, 0.5),
        ("constant", 60, 1.0),
        ("constant", 1000, 1.0),
        ("linear", 10, 1.0),
        ("linear", 60, 0.55),
        ("linear", 110, 0.1),
        ("linear", 111, 0.1),
        ("cosine", 60, 0.55),
        ("cosine", 35, 0.1 + 0.9 * 0.5 * (1 + math.sqrt(0.5))),
        ("inverse-square-root", 40, 0.5),
        ("inverse-square-root", 90, 1 / 3),
        ("WSD", 60, 1.0),
        ("WSD", 110, 0.1),
    ],
)
def test_hand_computed_learning_rates(style: str, samples: int, expected: float) -> None:
    config = dataclasses.replace(BASE, decay_style=style)
    assert learning_rate(config, samples) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("linear", 0.55),
        ("cosine", 0.55),
        ("exponential", 0.1 + 0.9 * (math.sqrt(2) - 1)),
        ("minus_sqrt", 0.3636039),
    ],
)
def test_hand_computed_wsd_half_way(style: str, expected: float) -> None:
    config = dataclasses.replace(BASE, decay_style="WSD", wsd_decay_style=style)
    assert learning_rate(config, 85) == pytest.approx(expected, rel=1e-6)


def test_warm_up_starts_at_its_own_value() -> None:
    config = dataclasses.replace(BASE, init_lr=0.2)
    assert [learning_rate(config, samples) for samples in (0, 5, 10)] == pytest.approx([0.2, 0.6, 1.0])


def test_hand_computed_weight_decay() -> None:
    growing = {"start_weight_decay": 0.1, "end_weight_decay": 0.3, "weight_decay_samples": 100}
    linear = dataclasses.replace(BASE, **growing, weight_decay_style="linear")
    cosine = dataclasses.replace(BASE, **growing, weight_decay_style="cosine")
    assert [weight_decay(linear, n) for n in (0, 25, 100, 200)] == pytest.approx([0.1, 0.15, 0.3, 0.3])
    assert [weight_decay(cosine, n) for n in (0, 50, 100)] == pytest.approx([0.1, 0.2, 0.3])


CASES = list(itertools.product(DECAY_STYLES, WSD_DECAY_STYLES, (0, 10, 12.5), (0.0, 0.05)))


@pytest.fixture
def witness_class(monkeypatch: pytest.MonkeyPatch) -> type:
    # megatron-core would import a Transformer Engine wheel that may be there without its extension.
    if "megatron.core" not in sys.modules:
        monkeypatch.setitem(sys.modules, "transformer_engine", None)
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler as Witness

    return Witness


@pytest.mark.parametrize(("style", "wsd_style", "warmup", "init"), CASES)
def test_equals_megatron_core(
    style: str, wsd_style: str, warmup: float, init: float, witness_class: type
) -> None:
    """Along the run, both schedules, groups with limits of their own; equal to the last bit."""
    config = dataclasses.replace(
        BASE,
        decay_style=style,
        wsd_decay_style=wsd_style,
        warmup_samples=warmup,
        init_lr=init,
        start_weight_decay=0.1,
        end_weight_decay=0.4,
        weight_decay_samples=90,
        weight_decay_style=WEIGHT_DECAY_STYLES[1 + (warmup > 0)],
    )
    groups = [{"params": []}, {"params": [], "max_lr": 2.0, "min_lr": 0.5, "wd_mult": 0.0}]
    ours = SimpleNamespace(param_groups=[dict(group) for group in groups])
    theirs = SimpleNamespace(param_groups=[dict(group) for group in groups])
    witness = witness_class(
        theirs,
        init_lr=init,
        max_lr=1.0,
        min_lr=0.1,
        lr_warmup_steps=warmup,
        lr_decay_steps=110,
        lr_decay_style=style,
        start_wd=0.1,
        end_wd=0.4,
        wd_incr_steps=90,
        wd_incr_style=config.weight_decay_style,
        wsd_decay_steps=50,
        lr_wsd_decay_style=wsd_style,
    )
    scheduler = OptimizerParamScheduler(ours, config)
    for _ in range(45):
        assert ours.param_groups == theirs.param_groups
        scheduler.step(3)
        witness.step(3)


def test_multipliers_apply() -> None:
    opt = optimizer(lr_mult=0.5, wd_mult=2.0)
    config = dataclasses.replace(BASE, decay_style="constant", start_weight_decay=0.1, end_weight_decay=0.1)
    OptimizerParamScheduler(opt, config).step(20)
    assert opt.param_groups[0]["lr"] == pytest.approx(0.5)
    assert opt.param_groups[0]["weight_decay"] == pytest.approx(0.2)


def test_resume_continues() -> None:
    first, second = optimizer(), optimizer()
    scheduler = OptimizerParamScheduler(first, BASE)
    scheduler.step(33)
    resumed = OptimizerParamScheduler(second, BASE)
    resumed.load_state_dict(scheduler.state_dict())
    for each in (scheduler, resumed):
        each.step(7)
    assert first.param_groups == second.param_groups


def test_resume_with_another_schedule() -> None:
    """K11: a changed schedule is an error that lists both values, unless a flag says whose to use."""
    scheduler = OptimizerParamScheduler(optimizer(), BASE)
    scheduler.step(60)
    state = scheduler.state_dict()
    changed = dataclasses.replace(BASE, max_lr=2.0, decay_style="cosine")

    opt = optimizer()
    resumed = OptimizerParamScheduler(opt, changed)
    with pytest.raises(
        ValueError, match=r"max_lr 1.0 in the checkpoint, 2.0 here; decay_style linear in .*cosine here"
    ):
        resumed.load_state_dict(state)
    resumed.load_state_dict(state, override=True)
    assert opt.param_groups[0]["lr"] == learning_rate(changed, 60)
    resumed.load_state_dict(state, use_checkpoint=True)
    assert opt.param_groups[0]["lr"] == learning_rate(BASE, 60)
    with pytest.raises(ValueError, match="contradict"):
        resumed.load_state_dict(state, override=True, use_checkpoint=True)


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"decay_style": "exponential"}, "--lr-decay-style"),
        ({"min_lr": 2.0}, "--min-lr"),
        ({"init_lr": 2.0}, "--lr-warmup-init"),
        ({"warmup_samples": 110}, "--lr-warmup-iters"),
        ({"decay_style": "WSD", "wsd_decay_samples": None}, "--lr-wsd-decay-iters"),
        ({"decay_style": "WSD", "wsd_decay_style": "inverse-square-root"}, "--lr-wsd-decay-style"),
        ({"start_weight_decay": 0.1}, "--end-weight-decay"),
        ({"end_weight_decay": 0.1}, "--weight-decay-incr-style"),
        ({"decay_samples": 0}, "--train-iters"),
    ],
)
def test_bad_schedules_name_their_flag(change: dict[str, Any], flag: str) -> None:
    with pytest.raises(ValueError, match=flag):
        dataclasses.replace(BASE, **change)


def training_config(**changes: Any) -> SimpleNamespace:
    config = {
        "global_batch_size": 8,
        "train_iters": 100,
        "train_samples": None,
        "lr": 1e-3,
        "min_lr": 1e-4,
        "lr_warmup_init": 0.0,
        "lr_warmup_iters": 10,
        "lr_warmup_samples": 0,
        "lr_warmup_fraction": None,
        "lr_decay_iters": None,
        "lr_decay_samples": None,
        "lr_decay_style": "cosine",
        "lr_wsd_decay_iters": None,
        "lr_wsd_decay_samples": None,
        "lr_wsd_decay_style": "exponential",
        "weight_decay": 0.1,
        "start_weight_decay": None,
        "end_weight_decay": None,
        "weight_decay_incr_style": "constant",
    }
    return SimpleNamespace(**{**config, **changes})


def test_schedule_from_iterations_counts_samples() -> None:
    schedule = schedule_from_config(training_config())
    assert (schedule.warmup_samples, schedule.decay_samples, schedule.weight_decay_samples) == (80, 800, 800)
    assert (schedule.start_weight_decay, schedule.end_weight_decay) == (0.1, 0.1)


def test_schedule_from_samples_and_fraction() -> None:
    schedule = schedule_from_config(
        training_config(train_iters=None, train_samples=1000, lr_warmup_iters=0, lr_warmup_fraction=0.01)
    )
    assert (schedule.warmup_samples, schedule.decay_samples) == (10, 1000)
