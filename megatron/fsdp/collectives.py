"""Gather, reduce-scatter and all-reduce of flat buffers, as a table per backend.

Nothing else in the package knows backends. Each operation takes a list of flat buffers (the groups of one unit), so
that a backend that can coalesce launches them as one, and returns a pending operation at once.

Note [gloo]
gloo's reduce_scatter puts as many bytes on the wire as an all_reduce, and its collectives run in order in one worker
thread. Here every rank sends each peer its slot and sums what it received, in fp32 whatever went over the wire: the
least bytes possible, and the sends of different operations overlap. Only an all-reduce in a wide dtype is gloo's
own: it sends as little, and its local sums run in gloo's threads. Every message has a tag of its own from a counter
per process group, so that matching never depends on when a rank posts it. docs/benchmarks.md has the measurements.

Note [NCCL]
Only equal-count, in-place all_gather_into_tensor, reduce_scatter_tensor and all_reduce: an all-to-all
reduce-scatter would multiply the traffic between nodes and lose in-network reduction. Sums are made in the wire dtype.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.fsdp.observe import GATHERS, REDUCTIONS, Done, Observed, Observer, Pending
from megatron.fsdp.pending import Reduction, TwoPhases, WorkList, Wrap

# torch 2.13 renamed them.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_NARROW = (torch.bfloat16, torch.float16)
_FIRST_TAG = 1 << 16
# Counters per live process group, shared by everything in the process that uses the group: one for gathers, one for
# reductions, because how these two interleave may differ between ranks (schedule.py, Note [One order]).
_TAGS: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_COMMUNICATORS: weakref.WeakValueDictionary = weakref.WeakValueDictionary()


@dataclass
class Traffic:
    """Calls and bytes that this rank sent for one kind of operation."""

    calls: int = 0
    bytes: int = 0


class Communicator:
    """One process group as FSDP uses it: size, rank, backend and what went over it.

    A size-1 communicator (group None) does nothing. Gathers and reductions get communicators of their own where the
    backend runs one communicator's operations in launch order (see `twin`).

    observer: told of every operation of this process; set it once, before the first.
    """

    observer: ClassVar[Observer | None] = None

    def __init__(self, group: dist.ProcessGroup | None, for_reductions: bool = False) -> None:
        self.group = group
        self._for_reductions = for_reductions
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.backend = "none" if group is None else dist.get_backend(group)
        self.traffic: dict[str, Traffic] = {}
        self._operations = _operations_of(self.backend)

    def twin(self) -> Communicator:
        """Return the communicator for reductions: the same ranks, operations ordered apart from this one's."""
        group = self.group
        if group is not None and self._operations.ordered and self.backend != "fake":
            group = dist.new_group(
                dist.get_process_group_ranks(group),
                use_local_synchronization=True,
                group_desc=group.group_desc,
                pg_options=_same_options(group, self.backend),
            )
        return Communicator(group, for_reductions=True)

    def next_tag(self) -> int:
        """Return a message tag that is new for the process group and the same on all its ranks."""
        counters = _TAGS.setdefault(
            self.group, (itertools.count(_FIRST_TAG, 2), itertools.count(_FIRST_TAG + 1, 2))
        )
        return next(counters[self._for_reductions])

    def count(self, operation: str, num_bytes: int) -> None:
        """Add one call of `operation` with `num_bytes` sent by this rank."""
        traffic = self.traffic.setdefault(operation, Traffic())
        traffic.calls += 1
        traffic.bytes += num_bytes

    def slot(self, buffer: Tensor, rank: int | None = None) -> Tensor:
        """Return the equal part of `buffer` that belongs to `rank` (default: this rank)."""
        rank = self.rank if rank is None else rank
        numel = buffer.numel() // self.size
        return buffer.narrow(0, rank * numel, numel)

    def all_gather(self, buffers: Sequence[Tensor], purpose: str = "") -> Pending:
        """Fill each flat buffer with every rank's slot, in place. purpose: what it serves, for an observer."""
        if self.size == 1:
            return Done()
        tell = self._tell("all_gather", buffers, purpose, GATHERS)
        return tell(self._operations.all_gather(self, buffers))

    def reduce_scatter(self, buffers: Sequence[Tensor], purpose: str = "") -> Reduction:
        """Sum each flat buffer over the ranks; `Reduction.results` are this rank's slots of the sums."""
        if self.size == 1:
            return Reduction(list(buffers))
        tell = self._tell("reduce_scatter", buffers, purpose, REDUCTIONS)
        return self._operations.reduce_scatter(self, buffers).observed(tell)

    def all_reduce(self, buffers: Sequence[Tensor], purpose: str = "") -> Reduction:
        """Sum each flat buffer over the ranks, in place; every rank gets the same bits."""
        if self.size == 1:
            return Reduction(list(buffers))
        tell = self._tell("all_reduce", buffers, purpose, REDUCTIONS)
        return self._operations.all_reduce(self, buffers).observed(tell)

    def _tell(self, name: str, buffers: Sequence[Tensor], purpose: str, lane: str) -> Wrap:
        """Tell the observer of a launch; what comes back wraps the operation, so that its end is told too."""
        if self.observer is None:
            return lambda pending: pending
        flight = self.observer.launched(name, self.group, buffers, purpose, lane)
        return functools.partial(Observed, self.observer, flight)


class MeshCommunicators:
    """The communicators of one placement: gather and reduce, inner and outer axis. Made when first used."""

    def __init__(self, inner: dist.ProcessGroup | None, outer: dist.ProcessGroup | None) -> None:
        self.gather = Communicator(inner)
        self.outer_gather = Communicator(outer)
        self._within: dict[int, Communicator] = {}

    @functools.cached_property
    def reduce(self) -> Communicator:
        """Reductions over the inner axis."""
        return self.gather.twin()

    @functools.cached_property
    def outer_reduce(self) -> Communicator:
        """Reductions over the outer axis."""
        return self.outer_gather.twin()

    def within(self, size: int) -> Communicator:
        """Gathers among runs of `size` neighbouring ranks of the inner axis; collective over them at first use."""
        if size not in self._within:
            ranks = dist.get_process_group_ranks(self.gather.group)
            first = self.gather.rank - self.gather.rank % size
            group = dist.new_group(ranks[first : first + size], use_local_synchronization=True)
            self._within[size] = Communicator(group)
        return self._within[size]


def mesh_communicators(inner: dist.ProcessGroup, outer: dist.ProcessGroup | None) -> MeshCommunicators:
    """Return the communicators of (inner, outer): the same ones for all units and models on these groups, as long as
    any lives.
    """
    made = _COMMUNICATORS.get((inner, outer))
    if made is None:
        made = _COMMUNICATORS[inner, outer] = MeshCommunicators(inner, outer)
    return made


@dataclass(frozen=True)
class Operations:
    """One column of the table. `ordered`: operations of one group run in launch order."""

    all_gather: Callable[[Communicator, Sequence[Tensor]], Pending]
    reduce_scatter: Callable[[Communicator, Sequence[Tensor]], Reduction]
    all_reduce: Callable[[Communicator, Sequence[Tensor]], Reduction]
    ordered: bool


# --- gloo -------------------------------------------------------------------------------------------


def _exchange(
    comm: Communicator, outgoing: dict[int, Tensor], incoming: dict[int, Tensor], tag: int
) -> list[dist.Work | None]:
    """Send `outgoing[peer]` to and receive `incoming[peer]` from every other rank, nearest ranks first."""
    works = []
    for peer in _peers(comm, -1):
        works.append(dist.irecv(incoming[peer], group=comm.group, group_src=peer, tag=tag))
    for peer in _peers(comm, 1):
        works.append(dist.isend(outgoing[peer], group=comm.group, group_dst=peer, tag=tag))
    return works


def _peers(comm: Communicator, direction: int = 1) -> list[int]:
    """The other ranks, from the next one on in `direction`."""
    return [(comm.rank + direction * step) % comm.size for step in range(1, comm.size)]


def _exchange_slots(comm: Communicator, buffer: Tensor, tag: int) -> list[dist.Work | None]:
    """Send this rank's slot of `buffer` to every rank and receive theirs in place."""
    own, peers = comm.slot(buffer), _peers(comm)
    comm.count("all_gather", own.nbytes * (comm.size - 1))
    return _exchange(comm, dict.fromkeys(peers, own), {peer: comm.slot(buffer, peer) for peer in peers}, tag)


def _gloo_all_gather(comm: Communicator, buffers: Sequence[Tensor]) -> Pending:
    return WorkList([work for buffer in buffers for work in _exchange_slots(comm, buffer, comm.next_tag())])


def _gloo_reduce_scatter(comm: Communicator, buffers: Sequence[Tensor]) -> Reduction:
    works: list[dist.Work | None] = []
    received, peers = [], _peers(comm)
    for buffer in buffers:
        parts = buffer.new_empty((comm.size - 1, buffer.numel() // comm.size))
        outgoing = {peer: comm.slot(buffer, peer) for peer in peers}
        works += _exchange(comm, outgoing, dict(zip(peers, parts.unbind(), strict=True)), comm.next_tag())
        received.append(parts)
        comm.count("reduce_scatter", parts.nbytes)
    reduction = Reduction([comm.slot(buffer) for buffer in buffers])

    def add_received() -> None:
        for index, parts in enumerate(received):
            total = reduction.results[index]
            if total.dtype in _NARROW:
                total = total.float()
            for part in parts.unbind():
                total.add_(part)
            reduction.results[index] = total
        received.clear()

    reduction._pending = WorkList(works, add_received)
    return reduction


def _gloo_all_reduce(comm: Communicator, buffers: Sequence[Tensor]) -> Reduction:
    if all(buffer.dtype not in _NARROW for buffer in buffers) or any(
        buffer.numel() % comm.size for buffer in buffers
    ):
        works = []
        for buffer in buffers:
            works.append(dist.all_reduce(buffer, group=comm.group, async_op=True))
            comm.count("all_reduce", 2 * buffer.nbytes * (comm.size - 1) // comm.size)
        return Reduction(list(buffers), WorkList(works))
    # The tags of the second phase are drawn when the first is posted, so that they match on all ranks.
    scatter = _gloo_reduce_scatter(comm, buffers)
    tags = [comm.next_tag() for _ in buffers]

    def gather() -> Pending:
        works: list[dist.Work | None] = []
        for buffer, total, tag in zip(buffers, scatter.results, tags, strict=True):
            own = comm.slot(buffer)
            if total.data_ptr() != own.data_ptr():
                own.copy_(total)
            works += _exchange_slots(comm, buffer, tag)
        return WorkList(works)

    return Reduction(list(buffers), TwoPhases(scatter, gather))


# --- NCCL, and the fake backend of a dry run ---------------------------------------------------------


def _coalesced(
    comm: Communicator, launch: Callable[[Tensor], dist.Work | None], buffers: Sequence[Tensor]
) -> Pending:
    if len(buffers) == 1 or comm.backend == "fake":
        works = [launch(buffer) for buffer in buffers]
        return WorkList(works)
    with dist._coalescing_manager(group=comm.group, device=buffers[0].device, async_ops=True) as manager:
        for buffer in buffers:
            launch(buffer)
    return WorkList([manager])  # type: ignore[list-item]


def _ordered_all_gather(comm: Communicator, buffers: Sequence[Tensor]) -> Pending:
    def launch(buffer: Tensor) -> dist.Work | None:
        own = comm.slot(buffer)
        comm.count("all_gather", own.nbytes * (comm.size - 1))
        return all_gather_single(buffer, own, group=comm.group, async_op=True)

    return _coalesced(comm, launch, buffers)


def _ordered_reduce_scatter(comm: Communicator, buffers: Sequence[Tensor]) -> Reduction:
    def launch(buffer: Tensor) -> dist.Work | None:
        own = comm.slot(buffer)
        comm.count("reduce_scatter", own.nbytes * (comm.size - 1))
        return reduce_scatter_single(own, buffer, group=comm.group, async_op=True)

    pending = _coalesced(comm, launch, buffers)
    return Reduction([comm.slot(buffer) for buffer in buffers], pending)


def _ordered_all_reduce(comm: Communicator, buffers: Sequence[Tensor]) -> Reduction:
    def launch(buffer: Tensor) -> dist.Work | None:
        comm.count("all_reduce", 2 * buffer.nbytes * (comm.size - 1) // comm.size)
        return dist.all_reduce(buffer, group=comm.group, async_op=True)

    pending = _coalesced(comm, launch, buffers)
    return Reduction(list(buffers), pending)


_GLOO = Operations(_gloo_all_gather, _gloo_reduce_scatter, _gloo_all_reduce, ordered=False)
_ORDERED = Operations(_ordered_all_gather, _ordered_reduce_scatter, _ordered_all_reduce, ordered=True)
_TABLE = {"gloo": _GLOO, "nccl": _ORDERED, "fake": _ORDERED, "none": _ORDERED}


def _operations_of(backend: str) -> Operations:
    # A group for two devices reports "cpu:gloo,cuda:nccl": FSDP uses the accelerator's.
    names = [part.rpartition(":")[2] for part in backend.split(",")]
    for name in ("nccl", "gloo", "fake", "none"):
        if name in names:
            return _TABLE[name]
    raise ValueError(
        f"--distributed-backend {backend!r} is not supported by FSDP; use nccl on GPUs or gloo on CPUs"
    )


def _same_options(group: dist.ProcessGroup, backend: str) -> object | None:
    """Options for a twin of `group`: its stream priority and its NCCL configuration."""
    if "nccl" not in backend:
        return None
    old, new = group._get_backend(torch.device("cuda")).options, dist.ProcessGroupNCCL.Options()
    new.is_high_priority_stream, new.config = old.is_high_priority_stream, old.config
    return new


def all_equal(value: int, comm: Communicator, device: torch.device) -> bool:
    """Whether all ranks of `comm` have the same `value`; one collective of 16 bytes."""
    if comm.size == 1 or comm.backend == "fake":  # a fake group has one rank to compare
        return True
    pair = torch.tensor([value, -value], dtype=torch.int64, device=device)
    dist.all_reduce(pair, dist.ReduceOp.MAX, group=comm.group)
    return bool(pair[0] == -pair[1])
