"""Operations in flight, and who is told of them. FSDP tells nobody by itself; a training program may."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

GATHERS, REDUCTIONS = "gathers", "reductions"


class Observer(Protocol):
    """Told of launches and waits; a token stands for the operation. Lanes: order holds within each."""

    def launched(
        self,
        operation: str,
        group: dist.ProcessGroup | None,
        tensors: Sequence[Tensor],
        purpose: str,
        lane: str,
    ) -> Any:
        """Return the token of an operation that starts now."""

    def waiting(self, flight: Any) -> None:
        """A thread begins to wait for it."""

    def ended(self, flight: Any) -> None:
        """Nothing is left to wait for. May be told more than once."""


class Pending(Protocol):
    """An operation in flight."""

    def poll(self) -> bool:
        """Start the next phase if the current one has ended, without waiting; True if nothing is left to do."""

    def wait(self) -> None:
        """Return when the result is usable by the current stream."""


class Done:
    """An operation that had nothing to do."""

    def poll(self) -> bool:
        """Nothing is left to do."""
        return True

    def wait(self) -> None:
        """Nothing to wait for."""


class Observed:
    """A pending operation that tells an observer when it is waited for and when it is over."""

    def __init__(self, observer: Observer, flight: Any, pending: Pending) -> None:
        self._pending, self._observer, self._flight = pending, observer, flight

    def poll(self) -> bool:
        """Start the next phase if the current one has ended; True if nothing is left to do."""
        over = self._pending.poll()
        if over:
            self._end()
        return over

    def wait(self) -> None:
        """Wait for the operation."""
        if self._flight is not None:
            self._observer.waiting(self._flight)
        self._pending.wait()
        self._end()

    def _end(self) -> None:
        if self._flight is not None:
            self._observer.ended(self._flight)
            self._flight = None
