"""The executor on gloo: records what the schedule says, computes what a loop computes, ends when something fails."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.parallel.pipeline.actions import PipelineShape
from megatron.parallel.pipeline.lower import lower
from megatron.parallel.pipeline.schedules import SCHEDULES, make_schedule
from megatron.parallel.pipeline.simulator import simulate
from tests.pool import Pool, RankError, run_ranks
from tests.unit.parallel.pipeline import stage_models
from tests.unit.parallel.pipeline.stage_models import Pipe

CASES = [
    (world, Pipe(schedule, count, chunks))
    for world in (1, 2, 4)
    for schedule in SCHEDULES
    for chunks in ((1,) if schedule == "1f1b" else (1, 2))
    for count in (1, world, 2 * world + 1)
]


@pytest.mark.parametrize(("world", "case"), CASES, ids=str)
def test_equals_a_loop(world: int, case: Pipe) -> None:
    """P17, P20: bit-equal losses and gradients, the order of the schedule, the peak of the simulator."""
    check(world, case)


def check(world: int, case: Pipe) -> None:
    shape = PipelineShape(world, case.num_microbatches, case.num_chunks)
    report = simulate(lower(make_schedule(case.schedule, shape), shape), shape)
    losses, gradients = stage_models.loop(case, shape.num_stages)
    results = run_ranks(stage_models.run_pipe, world, case)
    assert [loss for result in results for loss in result["losses"]] == losses
    for rank, result in enumerate(results):
        assert result["recorded"] == result["order"], stage_models.first_wrong(
            result["recorded"], result["order"]
        )
        assert result["peak"] == report.peak_in_flight[rank]
        expected = [gradients[2 * stage + index] for stage in result["stages"] for index in (0, 1)]
        for ours, theirs in zip(result["gradients"], expected, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("overlap", [True, False])
def test_messages_of_varying_length(schedule: str, overlap: bool) -> None:
    """P05: microbatches of 8, 12 and 8 rows, announced by headers; and with shapes known to both ends."""
    for headers in (True, False):
        case = Pipe(schedule, 3, lengths=(8, 12, 8), headers=headers, overlap=overlap)
        check(2, case)


def test_other_dtypes_and_messages_of_several_tensors() -> None:
    check(2, Pipe("1f1b", 3, dtype=torch.bfloat16))
    check(2, Pipe("interleaved", 3, num_chunks=2, dtype=torch.float64, pairs=True))
    check(3, Pipe("zero-bubble", 4, pairs=True, headers=True))


@pytest.mark.parametrize("headers", [False, True])
def test_any_dtype_travels(headers: bool) -> None:
    dtypes = [
        torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16,
        torch.int8, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2,
    ]  # fmt: skip
    for received in run_ranks(stage_models.send_all_dtypes, 2, dtypes, headers):
        for dtype, got in zip(dtypes, received, strict=False):
            expected = torch.arange(-3, 9).reshape(3, 4).to(dtype)
            assert got == (dtype, (3, 4), expected.reshape(-1).view(torch.uint8).tolist())
        assert received[-2][1] == (0, 4) and received[-1] == (torch.float32, (), [0, 0, 64, 64])


@pytest.mark.parametrize("chunks", [1, 2])
def test_evaluation_only_runs_forwards(chunks: int) -> None:
    case = Pipe("gpipe", 5, chunks)
    losses, _ = stage_models.loop(case, 2 * chunks)
    results = run_ranks(stage_models.run_pipe, 2, case, True)
    assert results[1]["losses"] == losses
    assert all(result["peak"] == 1 and result["gradients"] == [None] * 2 * chunks for result in results)


def test_an_error_in_a_stage_names_rank_stage_and_action() -> None:
    with pytest.raises(
        RankError, match=r"pipeline rank 1, stage 1, forward of microbatch 1: RuntimeError: boom"
    ):
        run_ranks(stage_models.run_pipe, 3, Pipe(fail="raise"))
    with pytest.raises(
        RankError, match=r"ValueError: pipeline rank 1, stage 1, forward of microbatch 1: too long"
    ):
        run_ranks(stage_models.run_pipe, 2, Pipe(fail="value"))


pool_to_lose = Pool()


@pytest.mark.parametrize("fail", ["exit", "stall"])
def test_a_rank_that_dies_or_stalls_ends_all(fail: str, tmp_path: Path) -> None:
    """All others end within the time-out and say what they waited for, and from whom."""
    case = Pipe(fail=fail, timeout_seconds=2)
    with pytest.raises(RankError):
        pool_to_lose.run(stage_models.run_and_note_errors, 3, case, str(tmp_path), timeout=60)
    for rank in (0, 2):
        seconds, text = (tmp_path / f"rank{rank}.txt").read_text().split("\n", 1)
        assert float(seconds) < 2 * case.timeout_seconds + 1
        assert f"pipeline rank {rank}, " in text and "waiting for" in text and "microbatch" in text
        assert "rank 1" in text
