"""What a run shows beside its line: times by phase, memory, stragglers, norms of parameters, MFU; and where it goes."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.parallel.flight import MESSAGES, FlightRecorder, Recorded
from megatron.train.interval import Extras, straggler_lines
from megatron.train.metrics import Reporter, ReportOptions
from megatron.train.report import hidden_numbers, known_peak
from megatron.train.sinks import TensorBoard, WandbOptions, WeightsAndBiases, Without
from megatron.train.step import StepResult
from megatron.train.timers import FORWARD, FORWARD_BACKWARD, Timers, timing_lines, timing_values
from tests.pool import run_ranks
from tests.unit.train.jobs import Outcome, run_jobs

RESULT = StepResult(2.0, 1.5, None, 64, False, 1.0, False)


class Kept:
    """A sink that remembers."""

    def __init__(self) -> None:
        self.points: list[tuple[int, dict[str, float]]] = []

    def write(self, iteration: int, values: Any) -> None:
        self.points.append((iteration, dict(values)))

    def close(self) -> None:
        self.points.append((-1, {}))


def test_timers_keep_to_their_level() -> None:
    meetings: list[int] = []
    timers = Timers(1, barrier=lambda: meetings.append(1))
    for _ in range(2):
        with timers(FORWARD_BACKWARD), timers(FORWARD):
            pass
    assert meetings == [1, 1]
    assert timers.names == ["forward-backward", "all-grads-sync", "optimizer"]
    first, rest = timers.take(), timers.take()
    assert first[0] > 0 and first[1:] == [0, 0] and rest == [0, 0, 0]
    assert timers.take_memory() == {}


def test_memory_of_phases() -> None:
    timers = Timers(0, memory=True)
    with timers(FORWARD):
        pass
    assert 10 < timers.take_memory()["memory/forward-compute"] < 1e6
    assert timers.names == []


def test_times_are_printed_as_megatron_does() -> None:
    seconds = [[0.1, 0.02], [0.3, 0.01]]
    lines = timing_lines(["forward-backward", "optimizer"], seconds, "minmax").splitlines()
    assert lines[0] == "(min, max) time across ranks (ms):"
    assert re.fullmatch(r"    forward-backward \.+: \(100\.00, 300\.00\)", lines[1])
    assert timing_lines(["optimizer"], [[0.02], [0.01]], "max").endswith(": 20.00")
    assert "rank  1: 300.00" in timing_lines(["f"], [[0.1], [0.3]], "all")
    assert timing_values(["f"], [[0.1], [0.3]], "all") == {"time/f": 0.3, "time/f/0": 0.1, "time/f/1": 0.3}


def test_stragglers_are_named() -> None:
    (line,) = straggler_lines(["a", "b", "c"], [0.1, 0.4, 0.2], 1)
    assert "median 200.0 ms" in line
    assert "slowest: rank 1 (b) 400.0 ms, 2.00 x" in line
    assert "fastest: rank 0 (a) 100.0 ms, 0.50 x" in line


def test_peaks_of_known_devices() -> None:
    assert known_peak("NVIDIA H200", "bf16") == 989.4
    assert known_peak("NVIDIA A100-SXM4-80GB", "fp16") == 312.0
    assert known_peak("NVIDIA H200", "fp32") is None
    assert known_peak("Something else", "bf16") is None and known_peak(None, "bf16") is None


def test_single_steps_go_to_boards_only() -> None:
    """--tensorboard-log-interval; loss, norm and rate are there once for an iteration."""
    options = ReportOptions(100, 4, 8, 1024, 4e12, 2, peak_tflops=10.0, step_interval=2)
    file, board = Kept(), Kept()
    reporter = Reporter(options, (file,), step_sinks=(board,))
    for iteration in range(1, 5):
        reporter.record(RESULT, iteration, 0.1)
    reporter.report(4, 32, RESULT, 0.1, extras=Extras({"time/optimizer": 0.5}))
    reporter.close()
    assert [iteration for iteration, _ in file.points] == [4, -1]
    assert [iteration for iteration, _ in board.points] == [2, 4, 4, -1]
    whole = file.points[0][1]
    assert board.points[0][1] == {"lm_loss": 2.0, "grad_norm": 1.5, "learning_rate": 0.1}
    assert board.points[2][1] == {k: v for k, v in whole.items() if k not in board.points[0][1]}
    assert whole["time/optimizer"] == 0.5
    assert whole["mfu"] == pytest.approx(whole["throughput"] / 10.0)


def test_boards_get_what_the_flags_say() -> None:
    from types import SimpleNamespace

    off = SimpleNamespace(
        log_timers_to_tensorboard=False,
        log_memory_to_tensorboard=False,
        log_world_size_to_tensorboard=False,
        log_loss_scale_to_tensorboard=False,
        log_validation_ppl_to_tensorboard=False,
    )
    names = (
        "time/x",
        "memory/x",
        "memory_mib",
        "world_size",
        "loss_scale",
        "lm_loss_validation_ppl",
        "lm_loss",
    )
    board = Kept()
    Without(board, hidden_numbers(off)).write(1, dict.fromkeys(names, 1.0))  # type: ignore[arg-type]
    assert list(board.points[0][1]) == ["lm_loss"]
    on = SimpleNamespace(**dict.fromkeys(vars(off), True))
    assert hidden_numbers(on) == ()  # type: ignore[arg-type]


def test_tensorboard_forgets_what_a_resume_repeats(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for points in ((1, 2, 3, 4), (3, 4, 5)):
        sink = TensorBoard(str(tmp_path), 1)
        for iteration in points:
            sink.write(iteration, {"lm_loss": float(iteration)})
        sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.step for event in events.Scalars("lm loss")] == [1, 2, 3, 4, 5]


def test_wandb_goes_on_in_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its step only ever grows, also where a resume goes back; the iteration is the axis."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    ids, steps = [], []
    for points in ((1, 2, 3), (2, 3)):
        options = WandbOptions("p", directory=str(tmp_path), mode="offline", identity=str(tmp_path / "save"))
        sink = WeightsAndBiases(options, {})
        for iteration in points:
            sink.write(iteration, {"lm_loss": 1.0})
        ids.append(sink.run_id)
        steps.append(sink._run.step)
        sink.close()
    assert ids[0] == ids[1] and steps == [3, 2] and wandb is not None


def test_a_recorder_counts_and_forgets() -> None:
    recorder = FlightRecorder()
    flights = [recorder.launched("all_reduce", None, (torch.ones(2, 3),), "x") for _ in range(3)]
    assert recorder.events == 3
    recorder.waiting(flights[0])
    recorder.ended(flights[0])
    recorder.ended(flights[0])  # a second time says nothing new
    assert recorder.events == 4 and recorder.waited > 0
    (lane,) = recorder.report()
    assert (lane["launched"], [p["sequence"] for p in lane["pending"]]) == (3, [2, 3])
    assert lane["last"]["sizes"] == [[2, 3]] and lane["last"]["purpose"] == "x"
    recorder.launched("messages", None, (), lane=MESSAGES)
    assert [lane["ordered"] for lane in recorder.report()] == [True, False]
    for _ in range(200):  # launched and never waited for
        recorder.launched("all_reduce", None, ())
    assert len(recorder.report()[0]["pending"]) <= 64


def groups(rank: int, world: int) -> Any:
    from megatron.parallel.flight import RECORDER
    from megatron.parallel.mesh import ParallelMesh, ParallelSizes

    group = ParallelMesh(ParallelSizes(tensor=2)).group("tp")
    with Recorded("all_reduce", group, (torch.ones(1),)):
        dist.all_reduce(torch.ones(1), group=group)
    lanes = [lane for lane in RECORDER.report() if lane["id"].startswith(group.group_name)]
    return [(lane["id"], lane["name"], lane["ranks"]) for lane in lanes]


def test_lanes_have_the_same_name_on_all_ranks() -> None:
    first, second = run_ranks(groups, 2)
    assert first == second and [lane[1:] for lane in first] == [("tp", [0, 1])]


def test_a_run_shows_it_all() -> None:
    """Norms by parameter add up to the whole norm; times, memory and stragglers are there."""
    words = (
        "--hidden-dropout 0 --attention-dropout 0 --global-batch-size 4 --train-iters 2 --eval-iters 0 "
        "--timing-log-level 2 --log-straggler --log-memory-to-tensorboard --log-norms-per-parameter "
        "--log-timers-to-tensorboard --clip-grad 0 --peak-tflops 1 --data-parallel-sharding-strategy optim_grads_params"
    )
    outcomes: list[Outcome] = run_ranks(run_jobs, 2, [words.split()], timeout=100)[0]
    (outcome,) = outcomes
    assert outcome.error is None, outcome.error
    values = outcome.numbers[-1]
    for kind, whole in (("param_norm/", "params_norm"), ("grad_norm/", "grad_norm")):
        parts = [value for name, value in values.items() if name.startswith(kind)]
        assert len(parts) > 10
        assert math.sqrt(sum(part**2 for part in parts)) == pytest.approx(values[whole], rel=1e-5)
    assert {"memory/forward-compute", "memory/optimizer", "mfu"} <= set(values)
    assert "(min, max) time across ranks (ms):" in outcome.text and "batch-generator" in outcome.text
    assert "stragglers: own time an iteration" in outcome.text
    json.dumps(values)
