"""What a run tells: Megatron's line, JSON lines, tensorboard, the progress bar, and nothing wrong about time."""

from __future__ import annotations

import io
import json
import re
import time
from pathlib import Path

import pytest
import torch

from megatron.train.evaluate import EvaluationResult
from megatron.train.metrics import Reporter, ReportOptions, memory_usage, training_line
from megatron.train.sinks import JsonLines, TensorBoard, WandbOptions, WeightsAndBiases
from megatron.train.step import StepResult

OPTIONS = ReportOptions(
    train_iters=100,
    log_interval=2,
    global_batch_size=8,
    tokens_per_step=1024,
    flops_per_step=4e9,
    world_size=2,
)


def result(loss: float, skipped: bool = False) -> StepResult:
    return StepResult(loss, 1.5, 3, 64, skipped, 1.0, False)


def fields(line: str) -> dict[str, str]:
    """Megatron's log readers split like this."""
    return dict(part.strip().split(": ", 1) for part in line.split("|") if ": " in part)


def test_the_line_is_megatrons() -> None:
    values = {
        "consumed_samples": 16,
        "iteration_time": 0.25,
        "throughput": 0.008,
        "tokens_per_second": 4096.0,
        "learning_rate": 1e-4,
        "lm_loss": 2.5,
        "loss_scale": 1.0,
        "grad_norm": 1.25,
        "num_zeros": 7,
        "params_norm": 13.5,
        "memory_mib": 512.0,
        "skipped_iterations": 1,
        "nan_iterations": 0,
    }
    line = training_line(2, values, OPTIONS)
    assert re.match(r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] iteration        2/     100 \| ", line)
    parts = fields(line)
    assert parts["lm loss"] == "2.500000E+00"
    assert parts["grad norm"] == "1.250"
    assert parts["learning rate"] == "1.000000E-04"
    assert parts["elapsed time per iteration (ms)"] == "250.0"
    assert parts["throughput per GPU (TFLOP/s/GPU)"] == "0.008"
    assert parts["number of skipped iterations"].strip() == "1"
    assert (parts["num zeros"], parts["params norm"]) == ("7", "13.500")


def test_an_interval_is_the_mean_of_its_steps(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    reporter = Reporter(OPTIONS, (JsonLines(path),))
    reporter.start_timer()
    for loss in (2.0, float("nan")):
        reporter.record(result(loss, skipped=loss != loss))
    reporter.report(2, 16, result(2.0), lr=0.1)
    for loss in (1.0, 3.0):
        reporter.record(result(loss))
    reporter.report(4, 32, result(3.0), lr=0.2)
    reporter.report_evaluation(4, "validation", EvaluationResult(1.5, 10))
    reporter.close()
    first, second, third = (json.loads(line) for line in path.read_text().splitlines())
    assert (first["lm_loss"], first["skipped_iterations"], first["nan_iterations"]) == (2.0, 1, 1)
    assert (second["lm_loss"], second["skipped_iterations"], second["iteration"]) == (2.0, 0, 4)
    assert third["lm_loss_validation"] == 1.5
    assert second["tokens_per_second"] == pytest.approx(1024 / second["iteration_time"])
    assert second["throughput"] == pytest.approx(4e9 / second["iteration_time"] / 2 / 1e12)


def test_pauses_do_not_count() -> None:
    stream = io.StringIO()
    reporter = Reporter(OPTIONS, stream=stream)
    reporter.start_timer()
    reporter.pause_timer()
    time.sleep(0.3)
    reporter.start_timer()
    reporter.record(result(1.0))
    reporter.report(2, 16, result(1.0), lr=0.1)
    assert 0 <= float(fields(stream.getvalue())["elapsed time per iteration (ms)"]) < 250


def test_intervals() -> None:
    reporter = Reporter(OPTIONS)
    assert [iteration for iteration in range(1, 7) if reporter.due(iteration)] == [2, 4, 6]


def test_json_lines_append(tmp_path: Path) -> None:
    for iteration in (1, 2):
        sink = JsonLines(tmp_path / "m")
        sink.write(iteration, {"x": 1.0})
        sink.close()
    assert [json.loads(line)["iteration"] for line in (tmp_path / "m").read_text().splitlines()] == [1, 2]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="--metrics-file .*file/x"):
        JsonLines(tmp_path / "file" / "x")


def test_tensorboard_gets_the_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoard(str(tmp_path), 10)
    sink.write(3, {"lm_loss": 2.5, "grad_norm": 1.0})
    sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"lm loss", "grad norm"}
    (event,) = events.Scalars("lm loss")
    assert (event.step, event.value) == (3, 2.5)


def test_wandb_writes_offline(tmp_path: Path) -> None:
    sink = WeightsAndBiases(WandbOptions("project", directory=str(tmp_path), mode="offline"), {"lr": 1})
    sink.write(1, {"lm_loss": 2.0})
    sink.close()
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_progress_bar() -> None:
    stream = Terminal()
    reporter = Reporter(OPTIONS, stream=stream)
    reporter.record(result(1.0))
    reporter.report(2, 16, result(1.0), lr=0.1)
    reporter.message("[not markup]")
    reporter.close()
    assert "training" in stream.getvalue()
    assert "[not markup]" in stream.getvalue()
    assert "lm loss: 1.000000E+00" in stream.getvalue()


def test_evaluations_are_framed() -> None:
    stream = io.StringIO()
    Reporter(OPTIONS, stream=stream).report_evaluation(5, "validation", EvaluationResult(2.0, 10))
    rule, line, end = stream.getvalue().splitlines()
    assert rule == end == "-" * len(line)
    assert line.startswith(
        " validation loss at iteration 5 | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00"
    )


def test_memory_is_the_process_on_cpu() -> None:
    assert 10 < memory_usage(torch.device("cpu"))["memory_mib"] < 1e6
