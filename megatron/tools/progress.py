"""Progress of a long command: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any


class Progress:
    """Counts documents, tokens and bytes read. Use as a context manager.

    Args:
        total_bytes: of the input.
        log_interval: documents between lines where stderr is no terminal.
        quiet: say nothing.
    """

    def __init__(self, total_bytes: int, log_interval: int, quiet: bool = False) -> None:
        self._total, self._interval, self._quiet = max(total_bytes, 1), max(log_interval, 1), quiet
        self._documents = self._tokens = self._logged = 0
        self._started = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Progress:
        return self

    def _start_bar(self) -> None:
        """Start drawing, which takes a thread: late, after processes were forked."""
        if self._bar is None and not self._quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("tokenizing"),
                BarColumn(),
                TaskProgressColumn(),
                TextColumn("{task.fields[counts]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._bar.start()
            self._task = self._bar.add_task("tokenizing", total=self._total, counts="")

    def update(self, position: int, documents: int, tokens: int) -> None:
        """Say that the input was read up to ``position`` and how many more documents and tokens are done."""
        self._start_bar()
        self._documents += documents
        self._tokens += tokens
        if self._bar is not None:
            self._bar.update(self._task, completed=position, counts=self._counts())
        elif not self._quiet and self._documents - self._logged >= self._interval:
            self._logged = self._documents
            print(f"{100 * position // self._total} % read, {self._counts()}", file=sys.stderr, flush=True)

    def _counts(self) -> str:
        speed = self._tokens / max(time.monotonic() - self._started, 1e-9)
        return f"{self._documents} documents, {self._tokens} tokens, {speed:.3g} tokens/s"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
