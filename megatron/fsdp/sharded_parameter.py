"""The sharded parameter: the DTensor that optimizers, state dicts and checkpoints see.

Note [Uneven shards]
A rank holds whole rows of a parameter, possibly none, as the layout says. DTensor's own arithmetic assumes even chunks:
its `full_tensor()`, its reductions and its checkpoint offsets would be wrong. So parameters, their `.grad`, and what is
made of them (by `detach()`, `clone()`, `double()`, `*`, an optimizer...) are `ShardedTensor`s, which know the layout.
sharded_ops.py says how operations run on them.

Note [Writes]
Writes to a sharded parameter are counted by its rows' version counter, alike on all ranks: by operations on it, on its
`.data` and on its `detach()`, and by in-place operations on its `to_local()`. These must run on every rank, also where
it has no rows (param_group.py, Note [Gather is due]).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.optim.optimizer import _foreach_supported_types as optimizer_types
from torch.utils._foreach_utils import _foreach_supported_types as utility_types

from megatron.fsdp.layout import GroupLayout, ItemLayout, RowRange
from megatron.fsdp.shard_info import (
    Chunk,
    Location,
    ShardInfo,
    chunk_list,
    gather_full,
    tensor_shard,
    write_items,
)
from megatron.fsdp.sharded_ops import dispatch


class RowShard(Shard):
    """`Shard(0)` that tells torch's state-dict functions which rows of a whole tensor are this rank's."""

    rows: RowRange | None

    @classmethod
    def of(cls, rows: RowRange | None) -> RowShard:
        """Return the placement for `rows`; None: for an axis of the mesh that a later one cuts together with."""
        placement = cls(0)
        placement.rows = rows
        return placement

    def _local_shard_size_and_offset(
        self, curr_local_size: int, num_chunks: int, rank: Any
    ) -> tuple[int, Any]:
        return (curr_local_size, 0) if self.rows is None else (self.rows.num_rows, self.rows.start)


class ShardedTensor(DTensor):
    """A DTensor with the layout of `shard_info` (Note [Uneven shards]).

    Attributes:
        shard_info: the layout.
    """

    shard_info: ShardInfo

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return dispatch(ShardedTensor, func, args, kwargs or {})

    def like(self, local: Tensor) -> ShardedTensor:
        """Return the tensor with this one's layout around `local`."""
        spec = self._spec
        if spec.tensor_meta.dtype != local.dtype:  # type: ignore[union-attr]
            meta = TensorMeta(spec.tensor_meta.shape, spec.tensor_meta.stride, local.dtype)  # type: ignore[union-attr]
            spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)
        return rebuild(local, self.shard_info, spec)

    @property
    def data(self) -> Any:  # type: ignore[override]
        """The tensor without a graph; assigning copies the values (torch would leave the local part as it was)."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        with torch.no_grad():
            self.detach().copy_(value)

    @property
    def placements(self) -> tuple[Placement, ...]:  # type: ignore[override]
        """The placements, equal to `Shard(0)` where the tensor is sharded; they know this rank's rows."""
        if not self.shard_info.groups or not self.shape:
            return self._spec.placements
        return (*(RowShard.of(None) for _ in self.shard_info.groups[1:]), RowShard.of(self.shard_info.rows))

    def data_ptr(self) -> int:
        """0: the memory is the rows'. Else it would be their offset, and checkpoint staging would follow it."""
        return 0

    def full_tensor(self, *, grad_placements: object = None) -> Tensor:
        """Return the whole tensor, without a graph; collective over the ranks that share it."""
        with torch.no_grad():
            return gather_full(self._local_tensor, self.shard_info, self.device_mesh)

    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        """Return this rank's rows, possibly none; differentiable."""
        if not torch.is_grad_enabled() or not self.requires_grad:
            return super().to_local(grad_placements=grad_placements)
        local = _ToLocal.apply(self)
        local._is_param = isinstance(self, nn.Parameter)
        return local

    def redistribute(self, device_mesh: Any = None, placements: Any = None, **_options: object) -> DTensor:  # type: ignore[override]
        """Return the tensor replicated, or itself for the placements it has; NotImplementedError for others."""
        if device_mesh is not None and device_mesh != self.device_mesh:
            placements = ("another mesh",)
        elif placements is None or tuple(placements) == self.placements:
            return self
        elif all(placement.is_replicate() for placement in placements):
            return DTensor.from_local(self.full_tensor(), self.device_mesh, list(placements), run_check=False)
        raise NotImplementedError(
            f"redistribute() of {self.shard_info.name} to {tuple(placements)}: its shards are cut at rows of a flat "
            f"buffer and not in even chunks; use full_tensor() and distribute that"
        )

    def __create_chunk_list__(self) -> list[Any]:
        return chunk_list(self.shard_info)

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        return write_items(self.shard_info, self._local_tensor, fqn)

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return tensor_shard(self.shard_info, self._local_tensor, index)

    def __deepcopy__(self, memo: dict) -> Any:
        copied = self.detach().clone()
        if isinstance(self, nn.Parameter):
            copied = nn.Parameter(copied, self.requires_grad)  # type: ignore[assignment]
            if self.grad is not None:
                copied.grad_dtype = self.grad.dtype  # type: ignore[attr-defined]
                copied.grad = self.grad.detach().clone()
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        parameter = self.requires_grad if isinstance(self, nn.Parameter) else None
        local = self._local_tensor.detach()
        if local.untyped_storage().nbytes() > local.nbytes:
            local = local.clone()  # a view of the rank's buffer would bring all of it
        return rebuild, (local, self.shard_info, self._spec, parameter)


class _ToLocal(torch.autograd.Function):
    """`to_local()` whose gradient has the layout."""

    @staticmethod
    def forward(ctx: Any, tensor: ShardedTensor) -> Tensor:  # type: ignore[override]
        ctx.tensor = tensor.detach()
        return tensor._local_tensor.view_as(tensor._local_tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return ctx.tensor.like(gradient)


def rebuild(local: Tensor, info: ShardInfo, spec: DTensorSpec, parameter: bool | None = None) -> Any:
    """Return the sharded tensor; a parameter if `parameter` (its requires_grad) is not None."""
    tensor = ShardedTensor.__new__(ShardedTensor, local, spec, requires_grad=False)
    tensor.shard_info = info
    return tensor if parameter is None else nn.Parameter(tensor, requires_grad=parameter)


def make_dtensor(
    local: Tensor, info: ShardInfo, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> ShardedTensor:
    """Return the DTensor of `info` around `local`, without communication."""
    stride, step = [], 1
    for size in reversed(info.shape):
        stride.append(step)
        step *= max(size, 1)
    meta = TensorMeta(torch.Size(info.shape), tuple(reversed(stride)), local.dtype)
    return rebuild(local, info, DTensorSpec(mesh, placements, tensor_meta=meta))


def make_parameter(
    local: Tensor, info: ShardInfo, mesh: DeviceMesh, placements: tuple[Placement, ...], requires_grad: bool
) -> nn.Parameter:
    """Return the sharded parameter of `info` around `local`."""
    return nn.Parameter(make_dtensor(local, info, mesh, placements), requires_grad=requires_grad)


for types in (optimizer_types, utility_types):  # as torch does for DTensor
    if ShardedTensor not in types:
        types.append(ShardedTensor)
torch.serialization.add_safe_globals(
    [rebuild, ShardInfo, Location, Chunk, GroupLayout, ItemLayout, RowRange, torch.Size]
)
