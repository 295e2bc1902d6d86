"""The words that schedules are written in: computations of a stage on a microbatch, and transfers between ranks.

Note "Stages and chunks": a pipeline of `num_ranks` ranks with `num_chunks` chunks (virtual stages) on each has
num_ranks * num_chunks stages; stage s is chunk s // num_ranks of rank s % num_ranks. PURE.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What is computed: forward, the whole backward, or its two halves."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"  # gradients of the inputs, what the stage before waits for
    WEIGHT = "W"  # gradients of the weights


@dataclass(frozen=True)
class Compute:
    """One computation of one stage on one microbatch."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"


@dataclass(frozen=True)
class Transfer:
    """What `producer` made goes from rank `source` to rank `target`: hidden states, or their gradients."""

    producer: Compute
    source: int
    target: int

    @property
    def consumer_stage(self) -> int:
        """The stage that the message is for."""
        return self.producer.stage + (1 if self.producer.kind is Kind.FORWARD else -1)

    @property
    def order(self) -> tuple[int, int, str, int, int]:
        """Position among transfers of the same moment, the same on all ranks."""
        producer = self.producer
        return (self.source, self.target, producer.kind.value, producer.stage, producer.microbatch)

    def __str__(self) -> str:
        return f"{self.producer} {self.source}->{self.target}"


@dataclass(frozen=True)
class Exchange:
    """Transfers that one rank posts together, in this order."""

    transfers: tuple[Transfer, ...]

    def __str__(self) -> str:
        return "[" + ", ".join(str(transfer) for transfer in self.transfers) + "]"


Order = tuple[Compute, ...]
"""What one rank computes, in order."""
Program = tuple[Compute | Exchange, ...]
"""What one rank does, in order. Posting an exchange does not wait; a computation waits for its own messages."""


@dataclass(frozen=True)
class PipelineShape:
    """Sizes of a pipeline (note "Stages and chunks").

    Raises ValueError for sizes below 1.
    """

    num_ranks: int
    num_microbatches: int
    num_chunks: int = 1

    def __post_init__(self) -> None:
        for name in ("num_ranks", "num_microbatches", "num_chunks"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"pipeline: {name} {value} must be at least 1")

    @property
    def num_stages(self) -> int:
        """Stages over all ranks."""
        return self.num_ranks * self.num_chunks

    def rank_of(self, stage: int) -> int:
        """The rank that holds `stage`."""
        return stage % self.num_ranks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of `rank`, by chunk."""
        return tuple(range(rank, self.num_stages, self.num_ranks))


def dependencies(action: Compute, num_stages: int, split: bool) -> list[Compute]:
    """What must be computed before `action`.

    split: the schedule computes input and weight gradients separately.
    """
    kind, stage, microbatch = action.kind, action.stage, action.microbatch
    if kind is Kind.FORWARD:
        return [Compute(kind, stage - 1, microbatch)] if stage > 0 else []
    if kind is Kind.WEIGHT:
        return [Compute(Kind.INPUT, stage, microbatch)]
    needed = [Compute(Kind.FORWARD, stage, microbatch)]
    if stage < num_stages - 1:
        needed.append(Compute(Kind.INPUT if split else Kind.BACKWARD, stage + 1, microbatch))
    return needed


def is_split(orders: tuple[Order, ...]) -> bool:
    """Whether a schedule computes input and weight gradients separately."""
    return any(action.kind is Kind.INPUT for order in orders for action in order)


def transfer_of(action: Compute, shape: PipelineShape) -> Transfer | None:
    """The message that `action`'s result is sent in; None where nobody else needs it."""
    if action.kind is Kind.WEIGHT:
        return None
    next_stage = action.stage + (1 if action.kind is Kind.FORWARD else -1)
    if not 0 <= next_stage < shape.num_stages:
        return None
    source, target = shape.rank_of(action.stage), shape.rank_of(next_stage)
    return Transfer(action, source, target) if source != target else None
