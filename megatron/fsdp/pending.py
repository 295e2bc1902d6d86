"""Operations in flight: handles to wait for, the local part that follows, and reductions of one or two phases."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from megatron.fsdp.observe import Done, Pending

Wrap = Callable[[Pending], Pending]


class WorkList:
    """Waits for torch work handles, then runs `after` once (the local part of the operation)."""

    def __init__(self, works: Sequence[dist.Work | None], after: Callable[[], None] | None = None) -> None:
        self._works = [work for work in works if work is not None]
        self._after = after

    def poll(self) -> bool:
        """Run the local part if all handles are done."""
        if not all(work.is_completed() for work in self._works):
            return False
        self.wait()
        return True

    def wait(self) -> None:
        """Wait for the handles, then run the local part."""
        for work in self._works:
            work.wait()
        self._works = []
        if self._after is not None:
            after, self._after = self._after, None
            after()


class Reduction:
    """A reduction in flight; `results` hold the sums after `wait`."""

    def __init__(self, results: list[Tensor], pending: Pending | None = None) -> None:
        self.results = results
        self._pending = pending or Done()

    def poll(self) -> bool:
        """Start the next phase if the current one has ended."""
        return self._pending.poll()

    def observed(self, wrap: Wrap) -> Reduction:
        """This reduction, its pending operation wrapped."""
        self._pending = wrap(self._pending)
        return self

    def wait(self) -> None:
        """Wait for the sums."""
        self._pending.wait()


class TwoPhases:
    """Runs `second()` when `first` is done and waits for both."""

    def __init__(self, first: Pending, second: Callable[[], Pending]) -> None:
        self._first = first
        self._make_second = second
        self._second: Pending | None = None

    def poll(self) -> bool:
        """Start the second phase if the first has ended."""
        if self._second is None:
            if not self._first.poll():
                return False
            self._second = self._make_second()
        return self._second.poll()

    def wait(self) -> None:
        """Wait for both phases."""
        if self._second is None:
            self._first.wait()
            self._second = self._make_second()
        self._second.wait()
