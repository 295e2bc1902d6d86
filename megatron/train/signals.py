"""Ending a run from outside: a signal, a duration, an interval. Ranks agree on it inside the step's one
collective.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any


class SignalCatcher:
    """Context in which a signal is remembered instead of ending the process; the old handler comes back
    after it.

    number None catches nothing.
    """

    def __init__(self, number: signal.Signals | None) -> None:
        self.number = number
        self.received = False
        self._old: Any = None

    def __enter__(self) -> SignalCatcher:
        if self.number is not None and threading.current_thread() is threading.main_thread():
            self._old = signal.signal(self.number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._old is not None:
            signal.signal(self.number, self._old)  # type: ignore[arg-type]
            self._old = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = True


class Deadline:
    """`passed` once `minutes` have gone by since construction; None: never."""

    def __init__(self, minutes: float | None) -> None:
        self._end = None if minutes is None else time.monotonic() + 60.0 * minutes

    @property
    def passed(self) -> bool:
        """Whether the time is up."""
        return self._end is not None and time.monotonic() >= self._end
