"""Schedules and the simulator: complete, free of deadlock under strict rules, with the known bubbles and peaks."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.parallel.pipeline.actions import Compute, Exchange, Kind, PipelineShape, Program
from megatron.parallel.pipeline.lower import ScheduleError, check_complete, finish_times, lower
from megatron.parallel.pipeline.schedules import (
    SCHEDULES,
    forward_only,
    gpipe,
    interleaved,
    make_schedule,
    one_forward_one_backward,
    peak_in_flight,
    zero_bubble,
)
from megatron.parallel.pipeline.simulator import simulate

NAMES = sorted(SCHEDULES)
shapes = st.builds(PipelineShape, st.integers(1, 8), st.integers(1, 24), st.integers(1, 4))


def chunks_allowed(name: str, shape: PipelineShape) -> PipelineShape:
    return PipelineShape(shape.num_ranks, shape.num_microbatches) if name == "1f1b" else shape


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(NAMES), shapes, st.integers(0, 3), st.randoms(use_true_random=False))
def test_any_size_runs_whatever_computations_take(
    name: str, shape: PipelineShape, more: int, chance: random.Random
) -> None:
    """P20: any number of microbatches >= 1, with less of them than ranks too."""
    shape = chunks_allowed(name, shape)
    orders = make_schedule(name, shape, shape.num_ranks + more)
    check_complete(orders, shape)
    programs = lower(orders, shape)
    durations = {action: chance.choice((0.1, 1.0, 7.0)) for order in orders for action in order}
    for blocking in (False, True):
        report = simulate(programs, shape, durations, transfer_time=0.3, blocking=blocking)
        assert report.makespan >= max(report.busy)
        assert report.peak_in_flight == tuple(peak_in_flight(order) for order in orders)


@settings(max_examples=30, deadline=None)
@given(shapes)
def test_evaluation_runs(shape: PipelineShape) -> None:
    orders = forward_only(shape)
    check_complete(orders, shape, forward_only=True)
    simulate(lower(orders, shape), shape)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_bubbles_are_those_of_the_papers(num_ranks: int, groups: int) -> None:
    count = num_ranks * groups

    def bubble(name: str, chunks: int = 1) -> float:
        shape = PipelineShape(num_ranks, count, chunks)
        return simulate(lower(make_schedule(name, shape), shape), shape).bubble

    plain = (num_ranks - 1) / (num_ranks - 1 + count)
    assert bubble("gpipe") == pytest.approx(plain)
    assert bubble("1f1b") == pytest.approx(plain)
    for chunks in (2, 4):  # arXiv:2104.04473: the idle time is divided by the number of chunks
        idle = (num_ranks - 1) / chunks
        assert bubble("interleaved", chunks) == pytest.approx(idle / (idle + count))
    # arXiv:2401.10241, ZB-H1: the idle time is (p - 1)(F + I - W) instead of (p - 1)(F + I + W)
    idle = num_ranks - 1
    assert bubble("zero-bubble") == pytest.approx(idle / (idle + 3 * count), abs=1e-9)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 7])
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 5, 12])
def test_peaks_are_known(num_ranks: int, num_microbatches: int) -> None:
    shape = PipelineShape(num_ranks, num_microbatches)
    assert {peak_in_flight(order) for order in gpipe(shape)} == {num_microbatches}
    depth = [min(num_ranks - rank, num_microbatches) for rank in range(num_ranks)]
    assert [peak_in_flight(order) for order in one_forward_one_backward(shape)] == depth
    assert max(peak_in_flight(order) for order in zero_bubble(shape)) <= max(depth)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(NAMES), shapes)
def test_each_stage_takes_microbatches_in_order(name: str, shape: PipelineShape) -> None:
    """Sums of gradients do not depend on the schedule, and queues of delayed weight gradients fit."""
    shape = chunks_allowed(name, shape)
    for order in make_schedule(name, shape):
        for stage in {action.stage for action in order}:
            for kind in Kind:
                seen = [one.microbatch for one in order if (one.stage, one.kind) == (stage, kind)]
                assert seen in ([], list(range(shape.num_microbatches)))


def test_the_order_of_interleaved_1f1b_is_megatrons() -> None:
    """2 ranks x 2 chunks x 4 microbatches, from arXiv:2104.04473, figure 4."""
    first = interleaved(PipelineShape(2, 4, 2))[0]
    assert " ".join(map(str, first)) == ("0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3")


def test_rules_are_named() -> None:
    with pytest.raises(ValueError, match=r"1f1b has one chunk on each rank, not 2"):
        make_schedule("1f1b", PipelineShape(2, 4, 2))
    with pytest.raises(ValueError, match=r"groups of 3 .* the least is 4"):
        make_schedule("interleaved", PipelineShape(4, 4, 2), 3)
    with pytest.raises(ValueError, match=r"'dualpipe': choose one of gpipe, 1f1b"):
        make_schedule("dualpipe", PipelineShape(2, 4))
    with pytest.raises(ValueError, match=r"num_microbatches 0"):
        PipelineShape(2, 0)


def test_an_incomplete_schedule_is_refused() -> None:
    shape = PipelineShape(2, 3)
    first, second = one_forward_one_backward(shape)
    with pytest.raises(ScheduleError, match=r"rank 0: .* 0B2"):
        check_complete((first[:-1], second), shape)
    with pytest.raises(ScheduleError, match="twice"):
        check_complete(((*first, first[0]), second), shape)


def test_a_schedule_that_waits_for_itself_is_found() -> None:
    shape = PipelineShape(2, 2)
    first = (*(Compute(Kind.FORWARD, 0, m) for m in (0, 1)), *(Compute(Kind.BACKWARD, 0, m) for m in (0, 1)))
    second = [Compute(kind, 1, m) for m in (0, 1) for kind in (Kind.BACKWARD, Kind.FORWARD)]
    with pytest.raises(ScheduleError, match=r"deadlocks: rank 0 at 0B0, rank 1 at 1B0"):
        finish_times((first, tuple(second)), shape)


def test_the_simulator_finds_conflicting_orders() -> None:
    """Rank 0 first wants a gradient, rank 1 first the hidden states that rank 0 sends after it."""
    shape = PipelineShape(2, 4)
    programs = lower(one_forward_one_backward(shape), shape)
    simulate(programs, shape)
    last = [index for index, step in enumerate(programs[1]) if isinstance(step, Exchange)]
    swapped = list(programs[1])
    swapped[last[0]], swapped[last[1]] = swapped[last[1]], swapped[last[0]]
    with pytest.raises(ScheduleError, match="deadlock: rank 0 waits at .*; rank 1 waits at 1F0"):
        simulate((programs[0], tuple(swapped)), shape)


def test_the_simulator_finds_a_missing_receive_and_an_early_send() -> None:
    shape = PipelineShape(2, 1)
    programs = lower(gpipe(shape), shape)
    without: Program = tuple(step for step in programs[1] if not isinstance(step, Exchange))
    with pytest.raises(ScheduleError, match="deadlock"):
        simulate((programs[0], without), shape)
    with pytest.raises(ScheduleError, match="rank 0 sends 0F0 0->1 before"):
        simulate(((programs[0][1], programs[0][0], *programs[0][2:]), programs[1]), shape)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(NAMES), shapes, st.randoms(use_true_random=False))
def test_moving_an_exchange_is_noticed_or_harmless(
    name: str, shape: PipelineShape, chance: random.Random
) -> None:
    """The simulator either runs a disturbed program to its end or says what is wrong; it never hangs or crashes."""
    shape = chunks_allowed(name, shape)
    programs = [list(program) for program in lower(make_schedule(name, shape), shape)]
    program = chance.choice(programs)
    first, second = chance.randrange(len(program)), chance.randrange(len(program))
    program[first], program[second] = program[second], program[first]
    try:
        report = simulate(tuple(tuple(one) for one in programs), shape)
    except ScheduleError as error:
        assert "rank" in str(error)
    else:
        assert len(report.spans) == sum(isinstance(step, Compute) for one in programs for step in one)
