"""The dynamic loss scale, by hand and against megatron-core's grad scaler rules."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron.train.loss_scale import LossScaleConfig, LossScaler, loss_scaler_from_config

DYNAMIC = LossScaleConfig(initial=16.0, dynamic=True, minimum=1.0, window=3, hysteresis=2)


def scales(overflows: str, config: LossScaleConfig = DYNAMIC) -> list[float]:
    """The scale after each step; "x" is an overflow."""
    scaler = LossScaler(config)
    result = []
    for step in overflows:
        scaler.update(step == "x")
        result.append(scaler.scale)
    return result


@pytest.mark.parametrize(
    ("overflows", "expected"),
    [
        ("...", [16, 16, 32]),
        ("xx", [16, 8]),
        ("xxx", [16, 8, 4]),
        ("x..x", [16, 16, 16, 8]),  # the second overflow in a window halves
        ("x...x", [16, 16, 16, 32, 32]),  # a clean window gives the patience back
        ("xxxxxxx", [16, 8, 4, 2, 1, 1, 1]),
    ],
)
def test_scale_follows_overflows(overflows: str, expected: list[float]) -> None:
    assert scales(overflows) == expected


def test_constant_scale_stays() -> None:
    assert scales("xx.....", LossScaleConfig(initial=8.0)) == [8.0] * 7


def test_resume_continues() -> None:
    first, second = LossScaler(DYNAMIC), LossScaler(DYNAMIC)
    for overflow in (True, False, False):
        first.update(overflow)
    second.load_state_dict(first.state_dict())
    for overflow in (False, True, True):
        first.update(overflow)
        second.update(overflow)
        assert first.state_dict() == second.state_dict()


def test_bad_scales_name_their_flag() -> None:
    with pytest.raises(ValueError, match="--loss-scale"):
        LossScaleConfig(initial=0.0)
    with pytest.raises(ValueError, match="--min-loss-scale"):
        LossScaleConfig(initial=2.0, dynamic=True, minimum=4.0)


def test_from_the_configuration() -> None:
    fp16 = SimpleNamespace(
        fp16=True,
        loss_scale=None,
        initial_loss_scale=2.0**16,
        min_loss_scale=1.0,
        loss_scale_window=500,
        hysteresis=1,
    )
    scaler = loss_scaler_from_config(fp16)
    assert (scaler.scale, scaler.config.dynamic, scaler.config.window) == (65536.0, True, 500)
    fp16.loss_scale = 128.0
    assert loss_scaler_from_config(fp16).config == LossScaleConfig(initial=128.0)
    fp16.fp16 = False
    assert loss_scaler_from_config(fp16).scale == 1.0
