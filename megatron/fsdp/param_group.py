"""One parameter group: its parameter, main-parameter and gradient buffers, and what may be done with them.

A group is the parameters of one unit with the same dtypes, mesh and row width. It knows nothing of modules' order or
hooks: `schedule.py` decides when its methods run.

Note [Buffers]
- `compute`: flat, full size, compute dtype. Its storage is released between uses where the strategy shards
  parameters, else persistent. The compute parameters are views of it. Storage is released by resizing it, never
  replaced, because autograd saves views of weights (`weight.t()`) that must see the data of the next gather.
- `kept`: between forward and backward, with `reshard_after_forward=<int>`: this rank's part of `compute` among that
  many ranks, from which the next gather fills the whole over the smaller group.
- `main`: flat, main dtype, this rank's shard (or the whole where the optimizer is replicated). A view of `compute`
  where the dtypes agree and `compute` is persistent.
- Gradient buffers: see gradients.py.

Note [Gather is due]
Compute parameters are stale when the main ones changed since the last gather. Every rank must come to the same answer:
an optimizer step (seen by a global hook, see optimizer.py), a load or broadcast (`mark_stale`), or an in-place change
of the sharded parameter or of what has its rows, which the rows' version counter shows (sharded_parameter.py, Note
[Writes]).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from megatron.fsdp.collectives import Communicator, MeshCommunicators, Pending
from megatron.fsdp.gradients import GroupGradients
from megatron.fsdp.layout import GroupLayout
from megatron.fsdp.main_grad import MainGrad
from megatron.fsdp.managed import ManagedParameter, ParameterSource
from megatron.fsdp.precision import GroupPrecision
from megatron.fsdp.shard_info import Location, ShardInfo
from megatron.fsdp.sharded_parameter import make_dtensor, make_parameter
from megatron.fsdp.strategy import Placements

if TYPE_CHECKING:
    from megatron.fsdp.buffers import Slot

Initialize = Callable[[str, nn.Parameter, slice, Tensor], None]


@dataclass(frozen=True)
class GroupSpec:
    """What is common to a group's parameters.

    Attributes:
        mesh: DeviceMesh of the sharded parameters: (shard,) or, where the outer axis shards, (outer, shard).
        placements: what is sharded.
        precision: dtypes.
        layout: of the flat buffer; its shards are inner-major: shard = inner_rank * outer_size + outer_rank.
        gradient_divisor: a fresh gradient, summed over the mesh, is divided by it.
        device: of the buffers.
    """

    mesh: DeviceMesh
    placements: Placements
    precision: GroupPrecision
    layout: GroupLayout
    gradient_divisor: float
    device: torch.device


class ParamGroup:
    """Buffers and operations of one parameter group (Note [Buffers])."""

    def __init__(self, sources: Sequence[ParameterSource], spec: GroupSpec, comms: MeshCommunicators) -> None:
        self.spec = spec
        self.comms = comms
        self.placements = spec.placements
        self.layout = spec.layout
        self.precision = spec.precision
        self.name = sources[0].name
        inner, outer = comms.gather, comms.outer_gather
        self.shard = inner.rank * outer.size + outer.rank if self.placements.outer_sharded else inner.rank
        self.gathered = False
        self.holders: set[int] = set()  # ids of the units that need the compute parameters now
        self.gather_pending: Pending | None = None
        self.kept: tuple[Tensor, Communicator] | None = None
        self.slot: Slot | None = None  # where the gathered parameters live if not in a storage of their own
        self.outer_pending: Pending | None = None
        self.stale = True
        self.unset = any(source.parameter.is_meta for source in sources)  # nobody has given values yet
        self._versions = 0
        self._using_compute = False
        self.parameters = [ManagedParameter(source, self, i) for i, source in enumerate(sources)]
        self.gradients = GroupGradients(self)
        self._allocate()
        self._make_parameters(sources)
        self.use_sharded(force=True)

    @functools.cached_property
    def label(self) -> str:
        """The group in words: how many parameters, the first one's name."""
        more = f" and {len(self.parameters) - 1} more" if len(self.parameters) > 1 else ""
        return f"{self.parameters[0].name}{more}"

    # --- construction ------------------------------------------------------------

    def _allocate(self) -> None:
        layout, precision, device = self.layout, self.precision, self.spec.device
        numel = layout.numel
        self.compute = torch.empty(numel, dtype=precision.compute, device=device)
        if precision.shares_storage and not self.placements.parameters_released:
            self.main = self.main_slot(self.compute)
        else:
            main_numel = layout.shard_numel if self.placements.optimizer_sharded else numel
            self.main = torch.zeros(main_numel, dtype=precision.main, device=device)
        self.inner: Tensor | None = None
        if self.placements.outer_sharded:
            inner_numel = numel // self.comms.gather.size
            self.inner = torch.empty(inner_numel, dtype=precision.compute, device=device)
        for start, stop in layout.padding_ranges():
            self.compute[start:stop] = 0

    def _make_parameters(self, sources: Sequence[ParameterSource]) -> None:
        overwrite = self.placements.gradients_sharded and all(source.overwrite_allowed for source in sources)
        for managed, source in zip(self.parameters, sources, strict=True):
            original = source.parameter
            managed.info = self._shard_info(managed, source, tuple(original.shape))
            managed.compute = nn.Parameter(self._view(self.compute, managed.index), original.requires_grad)
            self._fill(managed, original)
            managed.rows = self.main_rows(self.main, managed).data  # with a version counter of its own
            managed.sharded = make_parameter(
                managed.rows, managed.info, self.spec.mesh, self.dtensor_placements(managed),
                original.requires_grad,
            )  # fmt: skip
            for parameter in (managed.compute, managed.sharded):
                for key, value in vars(original).items():
                    setattr(parameter, key, value)
            managed.main_grad = MainGrad(
                managed.name, managed.compute, self.gradients, managed.index, overwrite, self.precision.grad
            )
            managed.sharded._fsdp_managed = managed  # type: ignore[attr-defined]
            original._fsdp_managed = managed  # type: ignore[attr-defined]
        if self.placements.parameters_released:
            self._release_storage()

    def _shard_info(
        self, managed: ManagedParameter, source: ParameterSource, shape: tuple[int, ...]
    ) -> ShardInfo:
        location = source.location or Location.whole(source.name, shape)
        if not self.placements.optimizer_sharded:
            return ShardInfo(source.name, shape, None, 0, 0, (), location)
        groups = [(self.comms.gather.group, self.comms.gather.size)]
        if self.placements.outer_sharded:
            groups.insert(0, (self.comms.outer_gather.group, self.comms.outer_gather.size))
        return ShardInfo(source.name, shape, self.layout, managed.index, self.shard, tuple(groups), location)

    def dtensor_placements(self, managed: ManagedParameter) -> tuple[Placement, ...]:
        one: Placement = Shard(0) if managed.info.groups else Replicate()
        return (one,) * self.spec.mesh.ndim

    def _fill(self, managed: ManagedParameter, original: nn.Parameter) -> None:
        if original.is_meta:
            return
        with torch.no_grad():
            data = original.detach()
            self.set_rows(managed, data)
            if not self.placements.parameters_released:
                managed.compute.copy_(data)

    def set_rows(self, managed: ManagedParameter, whole: Tensor) -> None:
        """Take this rank's rows of a parameter's whole value; `mark_stale` is the caller's."""
        self.main_rows(self.main, managed).copy_(whole[self._row_slice(managed)] if whole.ndim else whole)

    def sharded_copy(self, managed: ManagedParameter, whole: Tensor) -> Tensor:
        """Return a DTensor with the parameter's layout of this rank's rows of `whole`."""
        rows = whole.detach()[self._row_slice(managed)] if whole.ndim else whole.detach()
        return make_dtensor(
            rows.to(self.spec.device), managed.info, self.spec.mesh, self.dtensor_placements(managed)
        )

    def _row_slice(self, managed: ManagedParameter) -> slice:
        if not managed.info.groups:
            return slice(None)
        return slice(managed.info.rows.start, managed.info.rows.stop)

    def materialise(self, initialize: Initialize) -> None:
        """Draw this rank's rows of every parameter with `initialize(name, parameter, rows, out)`."""
        with torch.no_grad():
            for managed in self.parameters:
                shape, rows = managed.info.shape, self._row_slice(managed)
                start, stop, _ = rows.indices(shape[0] if shape else 1)
                initialize(
                    managed.name, managed.sharded, slice(start, stop), self.main_rows(self.main, managed)
                )
        self.mark_stale()

    # --- views ------------------------------------------------------------

    def _view(self, flat: Tensor, index: int) -> Tensor:
        """Parameter `index`'s view of a full-size flat buffer, with a version counter of its own."""
        item = self.layout.items[index]
        strides, step = [], 1
        for size in reversed(item.shape):
            strides.append(step)
            step *= max(size, 1)
        offset = flat.storage_offset() + item.offset
        view = torch.empty(0, dtype=flat.dtype, device=flat.device)
        return view.set_(flat.untyped_storage(), offset, item.shape, tuple(reversed(strides)))

    def main_slot(self, flat: Tensor) -> Tensor:
        """The part of a full-size flat buffer that corresponds to `main`."""
        if not self.placements.optimizer_sharded:
            return flat
        start, stop = self.layout.shard_range(self.shard)
        return flat[start:stop]

    def main_rows(self, main_like: Tensor, managed: ManagedParameter) -> Tensor:
        """The parameter's view of a buffer that is laid out as `main`; possibly no rows."""
        item = self.layout.items[managed.index]
        if not managed.info.groups:
            return main_like[item.offset : item.offset + item.numel].view(item.shape)
        rows = managed.info.rows
        numel = rows.num_rows * item.row_numel
        return main_like[rows.shard_offset : rows.shard_offset + numel].view(managed.info.local_shape())

    def use_compute(self) -> None:
        """Register the compute parameters on their modules."""
        if not self._using_compute:
            for managed in self.parameters:
                if managed.compute.requires_grad != managed.sharded.requires_grad:
                    managed.compute.requires_grad_(managed.sharded.requires_grad)
                    if managed.requires_grad and managed.on_trainable is not None:
                        managed.on_trainable(managed)
                managed.install(managed.compute)
            self._using_compute = True

    def use_sharded(self, force: bool = False) -> None:
        """Register the sharded parameters on their modules."""
        if self._using_compute or force:
            for managed in self.parameters:
                managed.install(managed.sharded)
            self._using_compute = False

    @property
    def uses_compute(self) -> bool:
        """Whether the modules have the compute parameters now."""
        return self._using_compute

    # --- parameters: gather and release ------------------------------------------------------------

    def mark_stale(self) -> None:
        """Say that the main parameters changed (load, broadcast, optimizer step)."""
        self.stale = True
        self.unset = False

    def is_stale(self) -> bool:
        """Whether the compute parameters are older than the main ones (Note [Gather is due])."""
        if not self.stale and self._count_versions() != self._versions:
            self.stale = True
        return self.stale

    def gather_due(self) -> bool:
        """Whether a use of the compute parameters needs work first."""
        if self.gather_pending is not None:
            return False
        return self.is_stale() or (self.placements.parameters_released and not self.gathered)

    def launch_outer_gather(self) -> None:
        """HFSDP: start to gather this rank's inner shard over the outer axis, if the main parameters changed."""
        if self.inner is None or not self.is_stale() or self.outer_pending is not None:
            return
        self.comms.outer_gather.slot(self.inner).copy_(self.main)
        self.outer_pending = self.comms.outer_gather.all_gather([self.inner], self.label)

    def prepare_gather(self) -> Communicator | None:
        """Fill this rank's part of `compute`; return the ranks to gather it from, None if that was all."""
        comm = self.comms.gather
        if self.placements.parameters_released:
            if self.slot is None:
                self.compute.untyped_storage().resize_(self.compute_bytes)
            else:
                self.slot.holder = self
            own = comm.slot(self.compute)
            if self.is_stale():
                self.kept = None
            if self.kept is not None:
                part, comm = self.kept
                comm.slot(self.compute).copy_(part)
            elif self.inner is not None:
                self.launch_outer_gather()
                if self.outer_pending is not None:
                    self.outer_pending.wait()
                    self.outer_pending = None
                own.copy_(self.inner)
            else:
                own.copy_(self.main)
        elif not self.precision.shares_storage:
            self.main_slot(self.compute).copy_(self.main)
        self.stale = False
        self._versions = self._count_versions()
        self.gathered = True
        return comm if self.placements.optimizer_sharded and comm.size > 1 else None

    def keep_part(self, size: int | None) -> None:
        """Before a release: keep this rank's part among `size` neighbouring ranks, None: nothing."""
        if size is None or not self.placements.parameters_released:
            self.kept = None
        elif self.gathered and self.kept is None:
            comm = self.comms.within(size)
            self.kept = comm.slot(self.compute).clone(), comm

    def release(self) -> None:
        """Put the sharded parameters back and release the storage of the compute ones, if the strategy does."""
        self.use_sharded()
        if self.placements.parameters_released and self.gathered:
            assert self.gather_pending is None, f"{self.name}: released while its gather is in flight"
            self._release_storage()

    def _release_storage(self) -> None:
        if self.slot is None:
            self.compute.untyped_storage().resize_(0)
        elif self.slot.holder is self:
            self.slot.holder = None
        self.gathered = False

    @property
    def compute_bytes(self) -> int:
        """Bytes of the gathered parameters, padding included."""
        return self.layout.numel * self.precision.compute.itemsize

    def has_room(self) -> bool:
        """Whether a gather finds its memory now."""
        return self.slot is None or self.slot.has_room(self)

    def move_compute(self, slot: Slot) -> None:
        """Let the compute parameters live in `slot` from now on; they are not gathered."""
        assert not self.gathered and self.placements.parameters_released
        numel = self.layout.numel
        with torch.no_grad():
            self.compute = torch.empty(0, dtype=self.precision.compute, device=self.spec.device)
            self.compute.set_(slot.storage, 0, (numel,), (1,))
            for managed in self.parameters:
                view = self._view(self.compute, managed.index)
                managed.compute.set_(slot.storage, view.storage_offset(), view.shape, view.stride())
        self.slot = slot

    def _count_versions(self) -> int:
        return sum(managed.writes for managed in self.parameters)

    @property
    def requires_grad(self) -> bool:
        """Whether any parameter asks for a gradient."""
        return any(managed.requires_grad for managed in self.parameters)
