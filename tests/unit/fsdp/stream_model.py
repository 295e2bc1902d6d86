"""Simulated streams: races and exposed time of a recorded step. Pure functions over plain records.

A record says what the host launched, in order. Streams run their own work in order; only waits order them among each
other (vector clocks). Buffers are storages: memory that is allocated on a stream and goes back to that stream's pool.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Work:
    """Work on a stream. `handle` of a collective: others wait for it by that."""

    stream: str
    name: str
    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    handle: int | None = None


@dataclass(frozen=True)
class Wait:
    """`waiter` goes on after all that `waited` has got so far."""

    waiter: str
    waited: str


@dataclass(frozen=True)
class WaitHandle:
    """`waiter` goes on after the collective `handle`."""

    waiter: str
    handle: int


@dataclass(frozen=True)
class Allocate:
    """`buffer` comes from `stream`'s pool: the allocator may give it what was freed there before."""

    stream: str
    buffer: int


@dataclass(frozen=True)
class Free:
    """`buffer` goes back to the pool that it came from."""

    buffer: int


Record = Work | Wait | WaitHandle | Allocate | Free
Clock = dict[str, int]


@dataclass
class _Buffer:
    owner: str
    accesses: list[tuple[str, int, bool, str]] = field(default_factory=list)  # stream, time, is a write, name


class _Clocks:
    """Vector clocks of streams and handles."""

    def __init__(self) -> None:
        self.of: defaultdict[str, Clock] = defaultdict(lambda: defaultdict(int))
        self.handles: dict[int, Clock] = {}

    def wait(self, waiter: str, seen: Clock) -> None:
        own = self.of[waiter]
        for stream, time in seen.items():
            own[stream] = max(own[stream], time)

    def tick(self, work: Work) -> int:
        own = self.of[work.stream]
        own[work.stream] += 1
        if work.handle is not None:
            self.handles[work.handle] = dict(own)
        return own[work.stream]


def races(records: Iterable[Record]) -> list[str]:
    """Return what is not ordered: a use of a buffer against another's write, a reuse of freed memory against a use."""
    clocks, buffers, found = _Clocks(), {}, []
    freed: defaultdict[str, list[_Buffer]] = defaultdict(list)

    def unordered(buffer: _Buffer, stream: str, writes: bool) -> list[str]:
        return [
            f"{name} on {other}"
            for other, time, wrote, name in buffer.accesses
            if other != stream and (wrote or writes) and clocks.of[stream][other] < time
        ]

    for record in records:
        if isinstance(record, Wait):
            clocks.wait(record.waiter, dict(clocks.of[record.waited]))
        elif isinstance(record, WaitHandle):
            clocks.wait(record.waiter, clocks.handles[record.handle])
        elif isinstance(record, Allocate):
            for old in freed.pop(record.stream, []):
                found += [
                    f"memory reused on {record.stream} while {it}"
                    for it in unordered(old, record.stream, True)
                ]
            buffers[record.buffer] = _Buffer(record.stream)
        elif isinstance(record, Free):
            buffer = buffers.pop(record.buffer, None)
            if buffer is not None:
                freed[buffer.owner].append(buffer)
        else:
            time = clocks.tick(record)
            for key in record.reads | record.writes:
                buffer = buffers.setdefault(key, _Buffer(record.stream))
                writes = key in record.writes
                found += [
                    f"{record.name} on {record.stream} beside {it}"
                    for it in unordered(buffer, record.stream, writes)
                ]
                if writes:
                    buffer.accesses = [
                        access
                        for access in buffer.accesses
                        if clocks.of[record.stream][access[0]] < access[1]
                    ]
                buffer.accesses.append((record.stream, time, writes, record.name))
    return found


def exposed(
    records: Sequence[Record], cost: Callable[[Work], float], stream: str = "compute"
) -> list[tuple[float, float]]:
    """Return the (time, length) of each gap in which `stream` waits; every stream runs its work as soon as it may."""
    now: defaultdict[str, float] = defaultdict(float)
    handles: dict[int, float] = {}
    gaps = []
    for record in records:
        if isinstance(record, Work):
            now[record.stream] += cost(record)
            if record.handle is not None:
                handles[record.handle] = now[record.stream]
        elif isinstance(record, Wait | WaitHandle):
            until = now[record.waited] if isinstance(record, Wait) else handles[record.handle]
            if until > now[record.waiter]:
                if record.waiter == stream:
                    gaps.append((now[stream], until - now[stream]))
                now[record.waiter] = until
    return gaps
