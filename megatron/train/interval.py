"""What ranks tell each other at the end of a log interval: times, stragglers, norms of parameters.

Nothing here runs unless a flag asks for it; what does is one or two collectives an interval.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron.parallel.flight import RECORDER, all_gather_objects
from megatron.parallel.mesh import ParallelMesh
from megatron.train.grad_norm import counts_here, sum_of_squares
from megatron.train.timers import Timers, timing_lines, timing_values

NameOf = Callable[[str, Tensor], str]


@dataclass(frozen=True)
class IntervalOptions:
    """timing_option: "max", "minmax" or "all". stragglers: how many slow and fast ranks to name, 0 for no report.
    per_parameter: norms of each parameter and its gradient.
    """

    timing_option: str = "minmax"
    stragglers: int = 0
    per_parameter: bool = False


@dataclass(frozen=True)
class Extras:
    """More of an interval: numbers for files, lines for the log."""

    values: Mapping[str, float] = field(default_factory=dict)
    lines: tuple[str, ...] = ()


class IntervalCollector:
    """Collects an interval's extras; `collect` is collective.

    Args:
        options: what to collect.
        timers: of the step.
        mesh: of the run.
        name_of: a parameter's name in the whole model.
    """

    def __init__(self, options: IntervalOptions, timers: Timers, mesh: ParallelMesh, name_of: NameOf) -> None:
        self.options, self.timers, self.mesh, self._name_of = options, timers, mesh, name_of
        self.start()

    def start(self) -> None:
        """An interval begins, or training goes on after a pause."""
        self._begin, self._waited = time.perf_counter(), RECORDER.waited

    def collect(
        self, steps: int, named_parameters: Sequence[tuple[str, Tensor]], device: torch.device
    ) -> Extras:
        """The extras of an interval of `steps` iterations.

        named_parameters: as the optimizer sees them, with the gradients of the last step.
        """
        steps = max(steps, 1)
        values: dict[str, float] = dict(self.timers.take_memory())
        lines: list[str] = []
        elapsed = time.perf_counter() - self._begin
        busy = max(elapsed - (RECORDER.waited - self._waited), 0.0) / steps
        seconds = [value / steps for value in self.timers.take()]
        if seconds or self.options.stragglers:
            everyone = all_gather_objects(
                (socket.gethostname(), busy, seconds), self.mesh.group("world"), "times of an interval"
            )
            if seconds:
                times = [found[2] for found in everyone]
                lines.append(timing_lines(self.timers.names, times, self.options.timing_option))
                values |= timing_values(self.timers.names, times, self.options.timing_option)
            if self.options.stragglers:
                hosts, busies = [found[0] for found in everyone], [found[1] for found in everyone]
                lines += straggler_lines(hosts, busies, self.options.stragglers)
                values |= {"straggler/slowest": max(busies), "straggler/median": statistics.median(busies)}
        if self.options.per_parameter:
            values |= norms_by_parameter(named_parameters, self.mesh, self._name_of, device)
        self.start()
        return Extras(values, tuple(lines))


def straggler_lines(hosts: Sequence[str], busy: Sequence[float], count: int) -> list[str]:
    """Which ranks take longest by themselves.

    hosts: by rank. busy: seconds an iteration, by rank, not counting waits for other ranks. count: of ranks to name at
    either end.

    On a GPU the host's waits are not the device's: there `busy` is the whole time of the interval, less host waits.
    """
    order = sorted(range(len(busy)), key=lambda rank: busy[rank], reverse=True)
    median = statistics.median(busy)

    def words(ranks: Sequence[int]) -> str:
        return ", ".join(
            f"rank {rank} ({hosts[rank]}) {1e3 * busy[rank]:.1f} ms, {busy[rank] / max(median, 1e-9):.2f} x"
            for rank in ranks
        )

    head = f"stragglers: own time an iteration, median {1e3 * median:.1f} ms"
    return [f"{head}; slowest: {words(order[:count])}; fastest: {words(order[::-1][:count])}"]


def norms_by_parameter(
    named_parameters: Sequence[tuple[str, Tensor]], mesh: ParallelMesh, name_of: NameOf, device: torch.device
) -> dict[str, float]:
    """L2 norm of every parameter ("param_norm/<name>") and of its gradient ("grad_norm/<name>") of the whole model.

    Every element counts once, on whatever ranks it lies (grad_norm.py, note "Who counts"). Collective.
    """
    own: dict[str, tuple[float, float]] = {}
    for name, parameter in named_parameters:
        if counts_here(parameter, mesh):
            gradients = [] if parameter.grad is None else [parameter.grad]
            pair = torch.stack([sum_of_squares([parameter], device), sum_of_squares(gradients, device)])
            weight, gradient = pair.tolist()
            own[name_of(name, parameter)] = (weight, gradient)
    totals: dict[str, tuple[float, float]] = {}
    for found in all_gather_objects(own, mesh.group("world"), "norms of parameters"):
        for name, (weight, gradient) in found.items():
            before = totals.get(name, (0.0, 0.0))
            totals[name] = (before[0] + weight, before[1] + gradient)
    values = {f"param_norm/{name}": pair[0] ** 0.5 for name, pair in sorted(totals.items())}
    return values | {f"grad_norm/{name}": pair[1] ** 0.5 for name, pair in sorted(totals.items())}
