"""What this process has launched, what it waits for and what has ended, of its collectives: for when a run hangs.

Note "Lanes". Collectives of one group run in one order, the same on all its ranks, so their numbers can be compared
between ranks. FSDP's gathers and reductions may share a group and interleave differently: each is a lane of its own.
Messages between two ranks are a lane that is not compared.

Note "Ended". On a CPU an operation has ended when the wait for it returned. On a GPU that only means that the current
stream waits for it: an event is recorded behind it, and asked (never waited for) when somebody wants to know.

A record costs some microseconds and holds no tensors.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

_MAX_PENDING = 64
_MAX_ASKED = 32
_MAX_RECENT = 48


@dataclass(slots=True, eq=False)
class Flight:
    """One operation.

    Attributes:
        sequence: its number on its lane, from 1.
        operation: "all_gather" and so on.
        sizes: of the tensors that it was given.
        purpose: what it serves, for people.
        state: "launched", "waiting" (somebody waits for it) or "ended".
        since: when it came to its state; time.monotonic().
        event: note "Ended"; None on a CPU.
    """

    sequence: int
    operation: str
    sizes: tuple[tuple[int, ...], ...]
    dtype: str
    purpose: str
    state: str = "launched"
    since: float = field(default_factory=time.monotonic)
    lane: Lane | None = None
    event: Any = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a report."""
        return {
            "sequence": self.sequence,
            "operation": self.operation,
            "sizes": [list(size) for size in self.sizes],
            "dtype": self.dtype,
            "purpose": self.purpose,
            "state": self.state,
            "seconds": round(time.monotonic() - self.since, 3),
        }


class Lane:
    """The operations of one kind of traffic of a group (note "Lanes")."""

    def __init__(self, name: str, identity: str, ranks: Sequence[int], *, ordered: bool) -> None:
        self.name, self.identity, self.ranks, self.ordered = name, identity, tuple(ranks), ordered
        self.launched = 0
        self.last: Flight | None = None
        self.pending: dict[int, Flight] = {}
        self.asked: deque[Flight] = deque(maxlen=_MAX_ASKED)
        self.recent: deque[Flight] = deque(maxlen=_MAX_RECENT)  # launched last, in order

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a report. Asks events; waits for nothing."""
        pending = [flight.as_dict() for flight in list(self.pending.values())]
        last = self.last
        for flight in list(self.asked):
            if flight.event is not None and not flight.event.query():
                pending.append({**flight.as_dict(), "state": "on the device"})
            elif flight.event is not None:
                last = flight
        return {
            "id": self.identity,
            "name": self.name,
            "ranks": list(self.ranks),
            "ordered": self.ordered,
            "launched": self.launched,
            "last": None if last is None else last.as_dict(),
            "pending": sorted(pending, key=lambda item: item["sequence"]),
            "recent": [flight.as_dict() for flight in list(self.recent)] if self.ordered else [],
        }


class FlightRecorder:
    """The lanes of this process. Launches may come from several threads (autograd's too)."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[str, str], Lane] = {}
        self._known: weakref.WeakKeyDictionary[Any, dict[str, Lane]] = weakref.WeakKeyDictionary()
        self._events = itertools.count(1)
        self.events = 0
        """Launches and ends so far; it stands still where nothing happens."""
        self.waited = 0.0
        """Seconds that threads of this process were held by waits."""

    def launched(
        self,
        operation: str,
        group: dist.ProcessGroup | None,
        tensors: Sequence[Tensor],
        purpose: str = "",
        lane: str = "",
    ) -> Flight:
        """An operation was launched on `group` (None: the default one)."""
        where = self._lane(group, lane)
        where.launched += 1
        flight = Flight(
            where.launched,
            operation,
            tuple(tuple(tensor.shape) for tensor in tensors),
            str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
            purpose,
            lane=where,
        )
        where.pending[flight.sequence] = flight
        where.recent.append(flight)
        if len(where.pending) > _MAX_PENDING:  # launched and never waited for
            where.pending.pop(next(iter(where.pending)), None)
        self.events = next(self._events)
        if tensors and tensors[0].is_cuda:
            flight.event = tensors[0].device
        return flight

    def waiting(self, flight: Flight) -> None:
        """A thread begins to wait for it."""
        if flight.state == "launched":
            flight.state, flight.since = "waiting", time.monotonic()

    def ended(self, flight: Flight) -> None:
        """The wait is over, or there was nothing left to wait for."""
        if flight.state == "ended" or flight.lane is None:
            return
        if flight.state == "waiting":
            self.waited += time.monotonic() - flight.since
        flight.state, flight.since = "ended", time.monotonic()
        flight.lane.pending.pop(flight.sequence, None)
        if flight.event is None:
            flight.lane.last = flight
        elif not torch.cuda.is_current_stream_capturing():
            flight.event = torch.cuda.Event()
            flight.event.record()
            flight.lane.asked.append(flight)
        self.events = next(self._events)

    def report(self) -> list[dict[str, Any]]:
        """All lanes as plain values; may be called from any thread at any time."""
        return [lane.as_dict() for lane in list(self._lanes.values())]

    def _lane(self, group: dist.ProcessGroup | None, suffix: str) -> Lane:
        group = dist.group.WORLD if group is None else group
        lanes = self._known.setdefault(self if group is None else group, {})
        if suffix not in lanes:
            name = getattr(group, "group_desc", "") or ""
            name = {"default_pg": "world", "undefined": "", "": ""}.get(name, name) or "group"
            ranks = [0] if group is None else dist.get_process_group_ranks(group)
            unique = getattr(group, "group_name", name), suffix
            lane = Lane(
                f"{name}, {suffix}" if suffix else name, "/".join(unique), ranks, ordered=suffix != MESSAGES
            )
            lanes[suffix] = self._lanes[unique] = lane
        return lanes[suffix]


MESSAGES = "messages"
# One a process, as a log is: whoever launches tells it, whoever looks into a hang asks it.
RECORDER = FlightRecorder()


class Recorded:
    """Context of a call that launches and waits by itself (torch's object collectives, say)."""

    def __init__(
        self,
        operation: str,
        group: dist.ProcessGroup | None,
        tensors: Sequence[Tensor] = (),
        purpose: str = "",
    ) -> None:
        self._call = (operation, group, tensors, purpose)
        self._flight: Flight | None = None

    def __enter__(self) -> None:
        self._flight = RECORDER.launched(*self._call)
        RECORDER.waiting(self._flight)

    def __exit__(self, *_: object) -> None:
        # An exception ends it too: the thread does not wait any more.
        assert self._flight is not None
        RECORDER.ended(self._flight)


def all_gather_objects(value: T, group: dist.ProcessGroup | None, purpose: str) -> list[T]:
    """The `value` of every rank of `group` (None: this rank alone), by rank. Collective, waits, and is recorded."""
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    with Recorded("all_gather_object", group, purpose=purpose):
        dist.all_gather_object(values, value, group=group)
    return values
