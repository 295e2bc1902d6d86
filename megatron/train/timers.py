"""How long the phases of a step take, and what memory they need, on this rank.

Note "Levels" (Megatron's). 0: nothing but the time of an iteration. 1: forward-backward, the end of gradient reduction,
the optimizer. 2: forward, backward and reading of each microbatch too. Phases beyond the level cost nothing.

Note "Clocks". On a GPU a phase is timed by events on the current stream, read when the numbers are taken, so that no
phase makes the host wait. With `barrier` all ranks meet before a phase of level 1, which separates a rank's own time
from its wait for others (Megatron's default for level 1).
"""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

BYTES_PER_MIB = 2**20
FORWARD_BACKWARD, GRADIENTS, OPTIMIZER = "forward-backward", "all-grads-sync", "optimizer"
FORWARD, BACKWARD, BATCH = "forward-compute", "backward-compute", "batch-generator"
LEVELS = {FORWARD_BACKWARD: 1, GRADIENTS: 1, OPTIMIZER: 1, BATCH: 2, FORWARD: 2, BACKWARD: 2}


class Timers:
    """Sums of times by phase since they were last taken.

    Args:
        level: note "Levels".
        device: of the run.
        barrier: called before a phase of level 1.
        memory: also record each phase's memory.
    """

    def __init__(
        self,
        level: int = 0,
        device: torch.device | str = "cpu",
        barrier: Callable[[], None] | None = None,
        *,
        memory: bool = False,
    ) -> None:
        self.level, self.device = level, torch.device(device)
        self.names = [name for name, needs in LEVELS.items() if needs <= level]
        self._barrier = barrier
        self._memory = memory
        self._sums: dict[str, float] = {}
        self._events: list[tuple[str, Any, Any]] = []
        self._peaks: dict[str, float] = {}
        self.peak = 0.0
        """Largest memory seen so far, MiB; kept where phases reset the allocator's own."""

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """A phase."""
        timed = LEVELS[name] <= self.level
        if not timed and not self._memory:
            yield
            return
        if timed and self._barrier is not None and LEVELS[name] == 1:
            self._barrier()
        if self._memory and self.device.type == "cuda":
            self.peak = max(self.peak, torch.cuda.max_memory_allocated(self.device) / BYTES_PER_MIB)
            torch.cuda.reset_peak_memory_stats(self.device)
        begin = self._now()
        try:
            yield
        finally:
            if timed:
                self._add(name, begin)
            if self._memory:
                self._peaks[name] = max(self._peaks.get(name, 0.0), self._phase_memory())

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _add(self, name: str, begin: Any) -> None:
        if self.device.type == "cuda":
            self._events.append((name, begin, self._now()))
        else:
            self._sums[name] = self._sums.get(name, 0.0) + time.perf_counter() - begin

    def _phase_memory(self) -> float:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / BYTES_PER_MIB
        return resident_mib()

    def take(self) -> list[float]:
        """Seconds of each of `names` since the last call."""
        for name, begin, end in self._events:
            end.synchronize()
            self._sums[name] = self._sums.get(name, 0.0) + begin.elapsed_time(end) / 1e3
        self._events.clear()
        taken = [self._sums.get(name, 0.0) for name in self.names]
        self._sums.clear()
        return taken

    def take_memory(self) -> dict[str, float]:
        """Largest memory of each phase since the last call, MiB, under names for the log."""
        peaks, self._peaks = self._peaks, {}
        values = {f"memory/{name}": peak for name, peak in peaks.items()}
        if self._memory and self.device.type == "cuda":
            values["memory/reserved"] = torch.cuda.memory_reserved(self.device) / BYTES_PER_MIB
            values["memory/allocated"] = torch.cuda.memory_allocated(self.device) / BYTES_PER_MIB
            values["memory/largest"] = max(self.peak, *peaks.values()) if peaks else self.peak
        return values


def resident_mib() -> float:
    """Memory of this process that is in RAM now, MiB; where that cannot be read the most it ever was."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize() / BYTES_PER_MIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1024 if sys.platform != "darwin" else BYTES_PER_MIB)


_HEADS = {
    "max": "max time across ranks (ms):",
    "minmax": "(min, max) time across ranks (ms):",
    "all": "times across ranks (ms):",
}


def timing_lines(names: Sequence[str], seconds: Sequence[Sequence[float]], option: str) -> str:
    """Times of all ranks as Megatron prints them.

    names: of the phases. seconds: [ranks][phases], per iteration. option: "max", "minmax" or "all".
    """
    lines = [_HEADS[option]]
    for index, name in enumerate(names):
        times = [1e3 * rank[index] for rank in seconds]
        if option == "all":
            lines.append(f"  {name}:")
            lines += [f"     rank {rank:2d}: {value:.2f}" for rank, value in enumerate(times)]
        else:
            text = f"{max(times):.2f}" if option == "max" else f"({min(times):.2f}, {max(times):.2f})"
            lines.append(f"    {(name + ' ').ljust(48, '.')}: {text}")
    return "\n".join(lines)


def timing_values(
    names: Sequence[str], seconds: Sequence[Sequence[float]], option: str
) -> Mapping[str, float]:
    """The same for files: seconds under "time/<phase>" (the largest), and by rank with "all"."""
    values = {f"time/{name}": max(rank[index] for rank in seconds) for index, name in enumerate(names)}
    if option == "all":
        values |= {
            f"time/{name}/{number}": rank[index]
            for index, name in enumerate(names)
            for number, rank in enumerate(seconds)
        }
    return values
