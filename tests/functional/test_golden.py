"""Comparing with golden values: what is exact, what is within a tolerance, what is missing, what moved."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.functional import check, golden, update_golden
from tests.functional.cases import all_cases, load

METRICS = {
    "lm loss": {1: 4.0, 2: 3.5},
    "grad-norm": {1: 1.0, 2: 2.0},
    "iteration-time": {1: 0.1234567, 2: 0.2},
}


def moved(metric: str, factor: float) -> golden.Metrics:
    return {**METRICS, metric: {step: value * factor for step, value in METRICS[metric].items()}}


@pytest.mark.parametrize(
    ("precision", "metric", "relative", "good"),
    [
        (None, "lm loss", 1e-15, False),
        ("fp32", "lm loss", 9e-6, True),
        ("fp32", "lm loss", 2e-5, False),
        ("fp32", "grad-norm", 9e-5, True),
        ("fp32", "grad-norm", 2e-4, False),
        ("bf16", "lm loss", 4e-3, True),
        ("bf16", "lm loss", 6e-3, False),
        (None, "iteration-time", 5.0, True),
    ],
)
def test_tolerances(precision: str | None, metric: str, relative: float, good: bool) -> None:
    faults = golden.compare(METRICS, moved(metric, 1 + relative), precision)
    assert (not faults) == good
    if not good:
        assert faults[0].relative == pytest.approx(relative, rel=0.5) and f"{metric}, step 1" in str(
            faults[0]
        )


def test_nan_and_missing_steps_are_faults() -> None:
    nan = {**METRICS, "lm loss": {1: float("nan"), 2: 3.5}}
    assert [fault.step for fault in golden.compare(METRICS, nan, "bf16")] == [1]
    assert [fault.step for fault in golden.compare(METRICS, {**METRICS, "lm loss": {1: 4.0}}, None)] == [2]
    assert len(golden.compare(METRICS, {}, "bf16")) == 4
    with pytest.raises(ValueError, match="has not reported mtp loss"):
        golden.select([{"iteration": 1, "lm_loss": 4.0}], ("lm loss", "mtp loss"))


def test_a_file_has_the_usual_form(tmp_path: Path) -> None:
    path = golden.path_of(tmp_path)
    golden.save(path, METRICS, {"torch": "x"})
    content = json.loads(path.read_text())
    assert content["lm loss"] == {
        "start_step": 1,
        "end_step": 2,
        "step_interval": 1,
        "values": {"1": 4.0, "2": 3.5},
    }
    assert content["iteration-time"]["values"]["1"] == 0.123
    metrics, recorded = golden.load(path)
    assert metrics["lm loss"] == METRICS["lm loss"] and recorded == {"torch": "x"}


def test_exact_only_where_the_numbers_were_made() -> None:
    here = golden.here(1)
    assert golden.same_place(here, {**here, "commit": "another"})
    for key in golden.SAME:
        assert not golden.same_place(here, {**here, key: "another"}), key
    assert not golden.same_place({**here, "runs": 1}, here), "exactness was not shown by a second run"


def test_another_place_compares_within_tolerances(tmp_path: Path) -> None:
    case = replace(load("gpt/dropout-ckpt-resume"), name=str(tmp_path))  # an absolute name is its own folder
    here = golden.here(1)
    golden.save(golden.path_of(tmp_path), METRICS, {**here, "platform": "elsewhere"})
    assert not check.golden_faults(case, moved("lm loss", 1 + 1e-6))
    assert "golden (of elsewhere): lm loss" in check.golden_faults(case, moved("lm loss", 1 + 1e-4))[0]
    golden.save(golden.path_of(tmp_path), METRICS, here)
    assert "golden (exact): lm loss" in check.golden_faults(case, moved("lm loss", 1 + 1e-6))[0]


def test_a_golden_file_thinner_than_the_run_is_a_fault(tmp_path: Path) -> None:
    case = replace(load("gpt/dropout-ckpt-resume"), name=str(tmp_path))
    path = golden.path_of(tmp_path)
    golden.save(path, {"lm loss": {1: 4.0}}, golden.here(1))
    assert check.golden_faults(case, METRICS) == [
        f"{path} lacks lm loss at step 2: scripts/update_golden.sh {tmp_path} records it",
        f"{path} lacks grad-norm: scripts/update_golden.sh {tmp_path} records it",
    ]


def test_a_kept_one_rank_run_is_of_this_place_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    case = load("gpt/dropout-ckpt-resume")
    paths = {check.one_rank_path(case)}
    paths.add(check.one_rank_path(replace(case, environment={"NVTE_FLASH_ATTN": "0"})))
    paths.add(check.one_rank_path(replace(case, environment={"OMP_NUM_THREADS": "7"})))
    monkeypatch.setattr("torch.__version__", "another")
    paths.add(check.one_rank_path(case))
    assert len(paths) == 4


def test_a_resume_that_began_anew_is_a_fault() -> None:
    case = load("gpt/dropout-ckpt-resume")
    rest = {name: {2: series[2]} for name, series in METRICS.items()}
    assert check.resume_faults(case, METRICS, rest) == []
    assert "has not resumed" in check.resume_faults(case, METRICS, METRICS)[0]
    assert "lm loss, step 2" in check.resume_faults(case, METRICS, {**rest, "lm loss": {2: 3.6}})[0]


def test_the_update_says_what_moved_and_how_much(tmp_path: Path) -> None:
    case = replace(load("gpt/dropout-ckpt-resume"), name=str(tmp_path))
    assert update_golden.moved(case, METRICS, "cpu") == ["new"]
    golden.save(golden.path_of(tmp_path), METRICS, {"commit": "abc"})
    assert update_golden.moved(case, METRICS, "cpu") == []
    (line,) = update_golden.moved(case, {**METRICS, "lm loss": {1: 4.0, 2: 3.5035}}, "cpu")
    assert line == "lm loss: first at step 2, at most 1.00e-03 (step 2: 3.5 -> 3.5035) since abc"
    assert update_golden.moved(case, {"lm loss": METRICS["lm loss"]}, "cpu") == ["grad-norm: gone"]


def test_the_update_stores_nothing_that_differs_between_two_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    case = replace(load("gpt/dropout-ckpt-resume"), name=str(tmp_path), test_type="regular", launches=())
    results = iter([[METRICS], [moved("lm loss", 1 + 1e-12)], [METRICS], [METRICS]])
    monkeypatch.setattr(update_golden, "_run", lambda case, options: next(results))
    options = argparse.Namespace(once=False, platform="cpu", force=False, diff=False)
    well, lines = update_golden.renew(case, options)
    assert not well and "two runs differ: lm loss" in lines[0] and not golden.path_of(tmp_path).exists()
    assert update_golden.renew(case, options) == (True, ["new"])
    _, recorded = golden.load(golden.path_of(tmp_path))
    assert set(golden.SAME) | {"commit", "runs"} == set(recorded)


def test_a_second_run_with_equal_numbers_makes_values_exact(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What one run gave is compared within tolerances; two equal runs are stored as such, and stay."""
    case = replace(load("gpt/dropout-ckpt-resume"), name=str(tmp_path), test_type="regular", launches=())
    monkeypatch.setattr(update_golden, "_run", lambda case, options: [METRICS])
    runs = []
    for once in (True, False, True):
        options = argparse.Namespace(once=once, platform="cpu", force=False, diff=False)
        assert update_golden.renew(case, options)[0]
        runs.append(golden.load(golden.path_of(tmp_path))[1]["runs"])
    assert runs == [1, 2, 2]


def test_every_case_has_its_golden_file() -> None:
    for case in all_cases():
        metrics, recorded = golden.load(golden.path_of(case.folder))
        assert set(metrics) == set(case.metrics), case.name
        assert set(golden.SAME) | {"commit"} <= set(recorded), case.name
        assert not recorded["commit"].endswith("-changed"), (
            f"{case.name}: made from a tree that was not committed"
        )
        steps = case.flags["--train-iters"]
        assert all(sorted(series) == list(range(1, steps + 1)) for series in metrics.values()), case.name
