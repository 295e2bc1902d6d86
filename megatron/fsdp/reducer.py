"""Reductions of units: launched in the order in which they are asked for, delivered oldest first."""

from __future__ import annotations

from collections import deque

import torch
from torch.profiler import record_function

from megatron.fsdp.collectives import Communicator, Reduction
from megatron.fsdp.param_group import ParamGroup
from megatron.fsdp.streams import Streams
from megatron.fsdp.unit import Unit, labels


class Reducer:
    """Keeps at most `max_reductions` launches of temporary buffers in flight; waiting for one delivers it to `.grad`.

    Launches of persistent buffers hold no memory that the wait would free: any number of them may be in flight.
    """

    def __init__(self, streams: Streams, max_reductions: int) -> None:
        self.streams = streams
        self.max_reductions = max_reductions
        self._in_flight: deque[tuple[list[ParamGroup], Reduction, bool]] = deque()

    def reduce(self, unit: Unit, now: bool, last: bool) -> None:
        """End the windows of a unit whose gradients are final and launch what is due.

        Args:
            unit: its gradients are all written.
            now: reduce a temporary window; else keep its gradient unreduced.
            last: reduce persistent buffers, and over the outer axis.
        """
        by_comm: dict[tuple[Communicator, bool], list[ParamGroup]] = {}
        with record_function(f"fsdp.reduce {unit.name}"), torch.no_grad():
            for group in (group for group in unit.groups if group.requires_grad):
                temporary = group.placements.gradients_sharded
                group.gradients.close_window()
                if temporary and not now:
                    group.gradients.defer()
                if now if temporary else last:
                    group.gradients.merge_deferred()
                    key = group.comms.reduce, group.placements.optimizer_sharded
                    by_comm.setdefault(key, []).append(group)
            if not by_comm:
                return
            self.streams.log.add("reduce", unit.name)
            for (comm, sharded), members in by_comm.items():
                with self.streams.reduce():
                    launch = comm.reduce_scatter if sharded else comm.all_reduce
                    reduction = launch([group.gradients.take_wire() for group in members], labels(members))
                self._in_flight.append((members, reduction, last))
        self.poll()
        while self._num_temporary() > self.max_reductions:
            self._finish_oldest()

    def poll(self) -> None:
        """Let launches whose messages have arrived do their local part, without waiting."""
        for _, reduction, _ in self._in_flight:
            reduction.poll()

    def _num_temporary(self) -> int:
        return sum(members[0].placements.gradients_sharded for members, _, _ in self._in_flight)

    def finish_persistent(self) -> None:
        """Before new gradients come: wait for launches of buffers that those would be written to."""
        if len(self._in_flight) > self._num_temporary():
            self.finish()

    def finish(self) -> None:
        """Wait until everything that was launched has been delivered."""
        while self._in_flight:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        members, reduction, last = self._in_flight.popleft()
        with torch.no_grad(), self.streams.reduce():
            reduction.wait()
            for group, total in zip(members, reduction.results, strict=True):
                group.gradients.deliver_inner(total)
            reduction.results = []
            if last or members[0].comms.outer_gather.size == 1:
                self._reduce_outer(members)
        self.streams.wait_reduce()

    def _reduce_outer(self, members: list[ParamGroup]) -> None:
        comm = members[0].comms.outer_reduce
        partials = [group.gradients.partial for group in members if group.gradients.partial is not None]
        if comm.size > 1:
            sharded = members[0].placements.outer_sharded
            reduction = (comm.reduce_scatter if sharded else comm.all_reduce)(partials, labels(members))
            reduction.wait()
            partials = reduction.results
        results = iter(partials)
        for group in members:
            group.gradients.expose(None if group.gradients.partial is None else next(results))
