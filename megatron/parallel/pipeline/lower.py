"""From what ranks compute to what they do: where in its order each rank posts its sends and receives. PURE.

Note "One order for all": a communicator runs what a rank posts in the order of posting, and a transfer takes place when
both ends have come to it (NCCL). So two ranks that post in conflicting orders wait for each other for ever. Here each
transfer belongs to a moment: when its producer finishes, if a computation takes the time in COSTS. A rank posts the
transfers of a moment together, after what it has computed until then and before whatever finishes later. A computation
then only waits for transfers of moments before its own finish, and a transfer only for computations that finish until
its moment and for earlier transfers: whatever real computations take, there is no cycle. The simulator checks it. Costs
that are near the truth keep ranks from waiting in the queue for a message that they do not need yet.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron.parallel.pipeline.actions import (
    Compute,
    Exchange,
    Kind,
    Order,
    PipelineShape,
    Program,
    Transfer,
    dependencies,
    is_split,
    transfer_of,
)

Costs = Mapping[Kind, float]
COSTS: Costs = {Kind.FORWARD: 1, Kind.BACKWARD: 2, Kind.INPUT: 1, Kind.WEIGHT: 1}


class ScheduleError(ValueError):
    """A schedule that cannot run: something is missing, twice, on a wrong rank, or waits for itself."""


def check_complete(orders: tuple[Order, ...], shape: PipelineShape, forward_only: bool = False) -> None:
    """Raise ScheduleError unless every stage computes all it must for every microbatch, once, on its rank."""
    split = is_split(orders)
    kinds = [Kind.FORWARD] if forward_only else [Kind.FORWARD, *(_SPLIT if split else [Kind.BACKWARD])]
    for rank, order in enumerate(orders):
        expected = {
            Compute(kind, stage, microbatch)
            for kind in kinds
            for stage in shape.stages_of(rank)
            for microbatch in range(shape.num_microbatches)
        }
        if len(order) != len(expected) or set(order) != expected:
            wrong = sorted(map(str, set(order) ^ expected)) or ["an action comes twice"]
            raise ScheduleError(f"rank {rank}: the schedule is not complete: {', '.join(wrong[:5])}")


_SPLIT = [Kind.INPUT, Kind.WEIGHT]


def finish_times(
    orders: tuple[Order, ...], shape: PipelineShape, costs: Costs = COSTS
) -> dict[Compute, float]:
    """When each computation finishes if messages take no time.

    Raises ScheduleError where ranks wait for each other for ever; names what each waits for.
    """
    split = is_split(orders)
    finish: dict[Compute, float] = {}
    position, clock = [0] * len(orders), [0.0] * len(orders)
    progress = True
    while progress:
        progress = False
        for rank, order in enumerate(orders):
            while position[rank] < len(order):
                action = order[position[rank]]
                needed = dependencies(action, shape.num_stages, split)
                if any(one not in finish for one in needed):
                    break
                start = max([clock[rank], *(finish[one] for one in needed)])
                finish[action] = clock[rank] = start + costs[action.kind]
                position[rank] += 1
                progress = True
    stuck = [f"rank {r} at {order[p]}" for r, (order, p) in enumerate(zip(orders, position, strict=True))
             if p < len(order)]  # fmt: skip
    if stuck:
        raise ScheduleError(f"the schedule deadlocks: {', '.join(stuck)}")
    return finish


def lower(orders: tuple[Order, ...], shape: PipelineShape) -> tuple[Program, ...]:
    """Put sends and receives into each rank's order (note "One order for all").

    Raises ScheduleError for a schedule that deadlocks.
    """
    finish = finish_times(orders, shape)
    moments: list[dict[float, list[Transfer]]] = [{} for _ in orders]
    for action, moment in finish.items():
        transfer = transfer_of(action, shape)
        if transfer is not None:
            for rank in (transfer.source, transfer.target):
                moments[rank].setdefault(moment, []).append(transfer)
    return tuple(_merge(order, finish, moments[rank]) for rank, order in enumerate(orders))


def _merge(order: Order, finish: Mapping[Compute, float], moments: dict[float, list[Transfer]]) -> Program:
    program: list[Compute | Exchange] = []
    waiting = sorted(moments, reverse=True)

    def post_before(moment: float) -> None:
        while waiting and waiting[-1] < moment:
            transfers = sorted(moments[waiting.pop()], key=lambda transfer: transfer.order)
            program.append(Exchange(tuple(transfers)))

    for action in order:
        post_before(finish[action])
        program.append(action)
    post_before(float("inf"))
    return tuple(program)
