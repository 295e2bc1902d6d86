"""--profile: torch's profiler, or the switch that nsys waits for, around chosen steps of chosen ranks."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import torch


class Profiler:
    """Context of a run; `step` is told of every finished iteration.

    With --use-pytorch-profiler, or without a GPU, a trace for chrome://tracing is written beside
    tensorboard's files (or into ./profile); else cudaProfilerStart and Stop are called for nsys.
    """

    def __init__(self, config: Any, rank: int) -> None:
        ranks = config.profile_ranks or (0,)
        self._active = bool(config.profile) and rank in ranks
        self._first, self._end = config.profile_step_start, config.profile_step_end
        self._trace = config.use_pytorch_profiler or not torch.cuda.is_available()
        self._stacks = config.pytorch_profiler_collect_callstack
        self._shapes = config.pytorch_profiler_collect_shapes
        self._path = Path(config.tensorboard_dir or "profile") / f"trace_rank{rank}.json"
        self._profiler: Any = None
        self._snapshot = config.memory_snapshot_path if config.record_memory_history else None

    def __enter__(self) -> Profiler:
        if self._snapshot is not None and torch.cuda.is_available():
            torch.cuda.memory._record_memory_history(max_entries=100_000)
        if self._active and self._first <= 0:
            self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        if self._snapshot is not None and torch.cuda.is_available():
            torch.cuda.memory._dump_snapshot(self._snapshot)

    def step(self, iteration: int) -> None:
        """An iteration has ended."""
        if not self._active:
            return
        if iteration + 1 == self._first:
            self._start()
        elif iteration + 1 == self._end:
            self._stop()

    def _start(self) -> None:
        if self._trace:
            self._profiler = torch.profiler.profile(record_shapes=self._shapes, with_stack=self._stacks)
            self._profiler.start()
        else:
            torch.cuda.cudart().cudaProfilerStart()

    def _stop(self) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._profiler.export_chrome_trace(str(self._path))
            self._profiler = None
            self._active = False
        elif self._active and not self._trace and torch.cuda.is_available():
            torch.cuda.cudart().cudaProfilerStop()
            self._active = False
