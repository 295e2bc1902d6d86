"""Runs programs on paper, under the strictest rules that a real communicator has. PURE.

Note "Rules": sends are rendezvous; every rank has one in-order queue of exchanges, in which an exchange begins when the
one before it is over and is over when all its transfers are (NCCL on one communicator); posting takes no time and does
not wait. A computation starts when the rank is free and the exchange that brings its message is over. With
`blocking`, a rank waits for every exchange where it posts it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron.parallel.pipeline.actions import (
    Compute,
    Exchange,
    Kind,
    PipelineShape,
    Program,
    Transfer,
    dependencies,
)
from megatron.parallel.pipeline.lower import COSTS, Costs, ScheduleError

Span = tuple[float, float]


@dataclass(frozen=True)
class Report:
    """What a run on paper showed.

    Attributes:
        spans: (start, end) of every computation.
        makespan: time until the last rank is done.
        busy: time that each rank computed.
        peak_in_flight: most microbatches of a stage whose activations each rank held at once.
    """

    spans: Mapping[Compute, Span]
    makespan: float
    busy: tuple[float, ...]
    peak_in_flight: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """Part of all ranks' time that is spent waiting, 0 to 1."""
        return 1.0 - sum(self.busy) / (len(self.busy) * self.makespan)


class _Rank:
    """One rank: its program, how far it came, its queue of exchanges."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.position = 0
        self.clock = 0.0
        self.queue: list[Exchange] = []
        self.posted: list[float] = []
        self.head = 0  # the first exchange in the queue that is not over
        self.head_since = 0.0
        self.over: dict[Transfer, float] = {}  # transfers of exchanges that are over: when they were
        self.happened: dict[Transfer, float] = {}  # transfers of the exchange at the head that took place

    def active(self) -> Exchange | None:
        return self.queue[self.head] if self.head < len(self.queue) else None

    def active_since(self) -> float:
        return max(self.posted[self.head], self.head_since)


@dataclass(frozen=True)
class _Rules:
    """What holds for all ranks of one run on paper."""

    shape: PipelineShape
    split: bool
    durations: Mapping[Compute, float] | Costs
    blocking: bool


def simulate(
    programs: tuple[Program, ...],
    shape: PipelineShape,
    durations: Mapping[Compute, float] | Costs = COSTS,
    *,
    transfer_time: float = 0.0,
    blocking: bool = False,
) -> Report:
    """Run `programs` (note "Rules").

    Args:
        programs: of all ranks.
        shape: of the pipeline.
        durations: of each computation, or by kind.
        transfer_time: that every transfer takes.
        blocking: ranks wait where they post.

    Raises ScheduleError, naming rank and action, where ranks wait for each other for ever or a message is missing.
    """
    ranks = [_Rank(program) for program in programs]
    split = any(
        isinstance(step, Compute) and step.kind is Kind.INPUT for program in programs for step in program
    )
    rules = _Rules(shape, split, durations, blocking)
    spans: dict[Compute, Span] = {}
    progress = True
    while progress:
        progress = False
        for index, rank in enumerate(ranks):
            while _advance(rank, index, rules, spans):
                progress = True
        progress |= _communicate(ranks, transfer_time)
    _check_over(ranks)
    busy = tuple(sum(spans[step][1] - spans[step][0] for step in rank.program if isinstance(step, Compute))
                 for rank in ranks)  # fmt: skip
    return Report(spans, max(rank.clock for rank in ranks), busy, tuple(_peak(rank, spans) for rank in ranks))


def _advance(rank: _Rank, index: int, rules: _Rules, spans: dict[Compute, Span]) -> bool:
    """Do the rank's next step if it can be done."""
    if rank.position == len(rank.program):
        return False
    if rules.blocking and rank.head < len(rank.queue):
        return False
    if rules.blocking:
        rank.clock = max(rank.clock, rank.head_since)
    step = rank.program[rank.position]
    if isinstance(step, Exchange):
        for transfer in step.transfers:
            if transfer.source == index and transfer.producer not in spans:
                raise ScheduleError(f"rank {index} sends {transfer} before it has computed it")
        rank.queue.append(step)
        rank.posted.append(rank.clock)
    else:
        start = rank.clock
        for needed in dependencies(step, rules.shape.num_stages, rules.split):
            arrival = _available(needed, rank, index, rules.shape, spans)
            if arrival is None:
                return False
            start = max(start, arrival)
        durations = rules.durations
        duration = durations[step] if step in durations else durations[step.kind]  # type: ignore[index]
        spans[step] = (start, start + duration)
        rank.clock = start + duration
    rank.position += 1
    return True


def _available(
    needed: Compute, rank: _Rank, index: int, shape: PipelineShape, spans: Mapping[Compute, Span]
) -> float | None:
    """When `rank` has the result of `needed`; None: not yet."""
    source = shape.rank_of(needed.stage)
    if source == index:
        return spans[needed][1] if needed in spans else None
    return rank.over.get(Transfer(needed, source, index))


def _communicate(ranks: list[_Rank], transfer_time: float) -> bool:
    """Let the transfers happen whose two ends are both at the head of their queues."""
    progress = False
    for index, rank in enumerate(ranks):
        exchange = rank.active()
        if exchange is None:
            continue
        for transfer in exchange.transfers:
            other = ranks[transfer.target if transfer.source == index else transfer.source]
            partner = other.active()
            if transfer in rank.happened or partner is None or transfer not in partner.transfers:
                continue
            done = max(rank.active_since(), other.active_since()) + transfer_time
            rank.happened[transfer] = other.happened[transfer] = done
            progress = True
    for rank in ranks:
        exchange = rank.active()
        if exchange is not None and len(rank.happened) == len(exchange.transfers):
            rank.head_since = max(rank.happened.values())
            rank.over.update(dict.fromkeys(exchange.transfers, rank.head_since))
            rank.happened = {}
            rank.head += 1
            progress = True
    return progress


def _check_over(ranks: list[_Rank]) -> None:
    stuck = []
    for index, rank in enumerate(ranks):
        if rank.position < len(rank.program):
            stuck.append(f"rank {index} waits at {rank.program[rank.position]}")
        elif rank.active() is not None:
            stuck.append(f"rank {index} still exchanges {rank.active()}")
    if stuck:
        raise ScheduleError(f"deadlock: {'; '.join(stuck)}")


def _peak(rank: _Rank, spans: Mapping[Compute, Span]) -> int:
    """Counted over time, not in the order of the program: from the start of F to the end of B or W."""
    changes = []
    for step in rank.program:
        if isinstance(step, Compute) and step.kind is Kind.FORWARD:
            changes.append((spans[step][0], 1))
        elif isinstance(step, Compute) and step.kind is not Kind.INPUT:
            changes.append((spans[step][1], -1))
    held = peak = 0
    for _, change in sorted(changes):
        held += change
        peak = max(peak, held)
    return peak
