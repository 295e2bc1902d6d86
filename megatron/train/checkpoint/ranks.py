"""The ranks that save or load together, and work that either succeeds on all of them or fails on all alike.

A save takes two of these rounds whatever it saves (note "Two rounds" in save.py). Where an action fails on one rank
the others learn of it in the same round, so nobody waits for a rank that has given up.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException

from megatron.parallel.flight import Recorded, all_gather_objects

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class _Failure:
    """Why an action failed on a rank; travels in place of its result."""

    rank: int
    reason: str


class RanksFailed(Exception):
    """An action failed on `rank`; raised on all ranks with the same words."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank}: {reason}")
        self.rank = rank
        self.reason = reason


def reason_of(error: BaseException) -> str:
    """The cause in a few words, for a message that names the file elsewhere."""
    if isinstance(error, CheckpointException):
        return "; ".join(sorted({reason_of(cause) for cause, _ in error.failures.values()}))
    if isinstance(error, OSError):
        return "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
    return f"{type(error).__name__}: {error}"


class Ranks:
    """The ranks of `group` (default: all), by their position in it. One rank needs no torch.distributed."""

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self.group = group
        several = dist.is_initialized() and dist.get_world_size(group) > 1
        self.size = dist.get_world_size(group) if several else 1
        self.rank = dist.get_rank(group) if several else 0
        self._first = 0 if group is None or not several else dist.get_global_rank(group, 0)

    def map_scatter(self, action: Callable[[], T], central: Callable[[list[T]], Sequence[R]]) -> R:
        """Run `action` on every rank and `central` on the first, over all results; give each its own answer.

        Raises RanksFailed, on all ranks, if any of it fails on any.
        """
        mine, error = self._attempt(action)
        gathered = self._gather(mine)
        answers: Sequence[Any] | None = None
        if gathered is not None:
            answers, error = self._central(gathered, central, error)
            if isinstance(answers, _Failure):
                answers = [answers] * self.size
        return self._checked(self._scatter(answers), error)

    def map_broadcast(self, action: Callable[[], T], central: Callable[[list[T]], R]) -> R:
        """As `map_scatter`, with one answer for all."""
        mine, error = self._attempt(action)
        gathered = self._gather(mine)
        answer: Any = None
        if gathered is not None:
            answer, error = self._central(gathered, central, error)
        return self._checked(self._broadcast(answer), error)

    def from_first(self, action: Callable[[], T]) -> T:
        """Run `action` on the first rank and give its result, or its ValueError, to all."""
        result: Any = None
        if self.rank == 0:
            try:
                result = action()
            except ValueError as error:
                if self.size == 1:
                    raise
                result = error
        result = self._broadcast(result)
        if isinstance(result, ValueError):
            raise ValueError(*result.args)
        return result

    def all_gather(self, value: T) -> list[T]:
        """The values of all ranks, by rank."""
        group = self.group or dist.group.WORLD
        return all_gather_objects(value, group if self.size > 1 else None, "checkpoint")

    def _attempt(self, action: Callable[[], T]) -> tuple[T | _Failure, Exception | None]:
        try:
            return action(), None
        except Exception as error:
            return _Failure(self.rank, reason_of(error)), error

    def _central(
        self, gathered: list[Any], central: Callable[[list[Any]], Any], error: Exception | None
    ) -> tuple[Any, Exception | None]:
        failure = next((value for value in gathered if isinstance(value, _Failure)), None)
        return (failure, error) if failure is not None else self._attempt(lambda: central(gathered))

    def _checked(self, answer: Any, error: Exception | None) -> Any:
        if isinstance(answer, _Failure):
            raise RanksFailed(answer.rank, answer.reason) from error
        return answer

    def _gather(self, value: Any) -> list[Any] | None:
        if self.size == 1:
            return [value]
        values = [None] * self.size if self.rank == 0 else None
        with Recorded("gather_object", self.group, purpose="checkpoint"):
            dist.gather_object(value, values, dst=self._first, group=self.group)
        return values

    def _scatter(self, values: Sequence[Any] | None) -> Any:
        if self.size == 1:
            assert values is not None
            return values[0]
        mine: list[Any] = [None]
        with Recorded("scatter_object_list", self.group, purpose="checkpoint"):
            dist.scatter_object_list(
                mine, None if values is None else list(values), src=self._first, group=self.group
            )
        return mine[0]

    def _broadcast(self, value: Any) -> Any:
        if self.size == 1:
            return value
        values = [value]
        with Recorded("broadcast_object_list", self.group, purpose="checkpoint"):
            dist.broadcast_object_list(values, src=self._first, group=self.group)
        return values[0]
