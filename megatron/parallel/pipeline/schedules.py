"""Schedules: pure functions from the sizes of a pipeline to what each rank computes, in order. PURE.

Note "Any number of microbatches": every schedule is made for any number >= 1. The interleaved order is regular only
for whole groups of microbatches: it is made for the next whole number of groups, and the microbatches that are too
many are left out. What is left of a schedule without deadlock has none: an order that respects all dependencies still
does when some microbatches, which depend on no other, are taken out of it.

Note "Microbatches in order": within a stage, every kind of work takes the microbatches in order, so that gradients add
up in the order of a loop over microbatches, and queues of delayed weight gradients are first in, first out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from megatron.parallel.pipeline.actions import Compute, Kind, Order, PipelineShape, dependencies

Orders = tuple[Order, ...]


def forward_only(shape: PipelineShape) -> Orders:
    """All forwards and nothing else: evaluation."""
    return tuple(tuple(_compute(Kind.FORWARD, step) for step in _forwards(shape, rank, shape.num_ranks))
                 for rank in range(shape.num_ranks))  # fmt: skip


def gpipe(shape: PipelineShape) -> Orders:
    """All forwards, then all backwards (GPipe, arXiv:1811.06965); activations of every microbatch are kept."""
    orders = []
    for rank in range(shape.num_ranks):
        stages, microbatches = shape.stages_of(rank), range(shape.num_microbatches)
        forwards = [(stage, microbatch) for stage in stages for microbatch in microbatches]
        backwards = [(stage, microbatch) for stage in reversed(stages) for microbatch in microbatches]
        orders.append(
            tuple(
                [_compute(Kind.FORWARD, step) for step in forwards]
                + [_compute(Kind.BACKWARD, step) for step in backwards]
            )
        )
    return tuple(orders)


def one_forward_one_backward(shape: PipelineShape) -> Orders:
    """1F1B (PipeDream-Flush, arXiv:2006.09503): rank r keeps at most num_ranks - r microbatches.

    Raises ValueError for more than one chunk on a rank.
    """
    if shape.num_chunks != 1:
        raise ValueError(
            f"1f1b has one chunk on each rank, not {shape.num_chunks}: use the interleaved schedule"
        )
    orders = []
    for rank in range(shape.num_ranks):
        steps = [(rank, microbatch) for microbatch in range(shape.num_microbatches)]
        orders.append(_alternate(steps, steps, shape.num_ranks - rank - 1))
    return tuple(orders)


def interleaved(shape: PipelineShape, group_size: int | None = None) -> Orders:
    """Interleaved 1F1B (arXiv:2104.04473): a rank takes `group_size` microbatches through its chunks in turn.

    group_size: at least num_ranks, which is the default.

    Raises ValueError for a smaller group.
    """
    group = group_size or shape.num_ranks
    if group < shape.num_ranks:
        raise ValueError(
            f"interleaved: groups of {group} microbatches are too small for {shape.num_ranks} ranks; "
            f"the least is {shape.num_ranks}"
        )
    # With less than one group, a smaller one would do; but a group is never smaller than the pipeline is long.
    whole_groups = -(-shape.num_microbatches // group) * group
    whole = PipelineShape(shape.num_ranks, whole_groups, shape.num_chunks)
    orders = []
    for rank in range(shape.num_ranks):
        warmup = 2 * (shape.num_ranks - rank - 1) + (shape.num_chunks - 1) * group
        order = _alternate(_forwards(whole, rank, group), _backwards(whole, rank, group), warmup)
        orders.append(tuple(action for action in order if action.microbatch < shape.num_microbatches))
    return tuple(orders)


def zero_bubble(shape: PipelineShape, group_size: int | None = None) -> Orders:
    """Backward in two halves (ZB-H1, arXiv:2401.10241): weight gradients wait and fill what would be bubbles.

    The order of forwards and input gradients is that of 1F1B, or interleaved 1F1B where ranks hold several chunks. A
    rank keeps activations until their weight gradient, and no more of them than the first rank does in that schedule.
    """
    base = one_forward_one_backward(shape) if shape.num_chunks == 1 else interleaved(shape, group_size)
    limit = max(peak_in_flight(order) for order in base)
    waiting = [deque(_as_input_gradient(action) for action in order) for order in base]
    pending: list[deque[Compute]] = [deque() for _ in base]
    orders: list[list[Compute]] = [[] for _ in base]
    held = [0] * shape.num_ranks
    done: set[Compute] = set()
    while any(waiting) or any(pending):
        finished = []  # what the ranks do in one unit of time
        for rank in range(shape.num_ranks):
            action = _choose(waiting[rank], pending[rank], held[rank] < limit, done, shape.num_stages)
            if action is None:
                continue
            finished.append(action)
            orders[rank].append(action)
            (pending if action.kind is Kind.WEIGHT else waiting)[rank].popleft()
            held[rank] += (action.kind is Kind.FORWARD) - (action.kind is Kind.WEIGHT)
            if action.kind is Kind.INPUT:
                pending[rank].append(Compute(Kind.WEIGHT, action.stage, action.microbatch))
        assert finished, f"no rank can go on: {[str(queue[0]) for queue in waiting if queue]}"
        done.update(finished)
    return tuple(tuple(order) for order in orders)


SCHEDULES: dict[str, Callable[[PipelineShape, int | None], Orders]] = {
    "gpipe": lambda shape, _group: gpipe(shape),
    "1f1b": lambda shape, _group: one_forward_one_backward(shape),
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
}


def make_schedule(name: str, shape: PipelineShape, group_size: int | None = None) -> Orders:
    """The schedule called `name`, one of SCHEDULES.

    group_size: microbatches that go through a chunk in a row, where chunks are interleaved.

    Raises ValueError for an unknown name or sizes that the schedule's rule does not allow.
    """
    if name not in SCHEDULES:
        raise ValueError(f"no schedule is called {name!r}: choose one of {', '.join(SCHEDULES)}")
    return SCHEDULES[name](shape, group_size)


def peak_in_flight(order: Order) -> int:
    """The most microbatches (of a stage) whose activations the rank holds at once: from F to B, or to W."""
    held = peak = 0
    for action in order:
        held += (action.kind is Kind.FORWARD) - (action.kind in (Kind.BACKWARD, Kind.WEIGHT))
        peak = max(peak, held)
    return peak


def _compute(kind: Kind, step: tuple[int, int]) -> Compute:
    return Compute(kind, *step)


def _forwards(shape: PipelineShape, rank: int, group: int) -> list[tuple[int, int]]:
    """(stage, microbatch): groups of microbatches, each through all chunks."""
    count = shape.num_microbatches
    return [
        (stage, microbatch)
        for start in range(0, count, group)
        for stage in shape.stages_of(rank)
        for microbatch in range(start, min(start + group, count))
    ]


def _backwards(shape: PipelineShape, rank: int, group: int) -> list[tuple[int, int]]:
    """The same, through the chunks in reverse."""
    count = shape.num_microbatches
    return [
        (stage, microbatch)
        for start in range(0, count, group)
        for stage in reversed(shape.stages_of(rank))
        for microbatch in range(start, min(start + group, count))
    ]


def _alternate(forwards: list[tuple[int, int]], backwards: list[tuple[int, int]], warmup: int) -> Order:
    """`warmup` forwards, then one forward and one backward in turn, then the backwards that are left."""
    actions = [_compute(Kind.FORWARD, step) for step in forwards[:warmup]]
    rest = forwards[warmup:]
    for forward, backward in zip(rest, backwards, strict=False):
        actions += [_compute(Kind.FORWARD, forward), _compute(Kind.BACKWARD, backward)]
    actions += [_compute(Kind.BACKWARD, step) for step in backwards[len(rest) :]]
    return tuple(actions)


def _as_input_gradient(action: Compute) -> Compute:
    kind = Kind.INPUT if action.kind is Kind.BACKWARD else action.kind
    return Compute(kind, action.stage, action.microbatch)


def _choose(
    waiting: deque[Compute], pending: deque[Compute], room: bool, done: set[Compute], num_stages: int
) -> Compute | None:
    """What a rank does next: its order if it can go on and has room for it, else a weight gradient."""
    if waiting:
        action = waiting[0]
        ready = all(needed in done for needed in dependencies(action, num_stages, True))
        if ready and (room or action.kind is not Kind.FORWARD):
            return action
    return pending[0] if pending else None
