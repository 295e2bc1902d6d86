"""The sharded parameter: the DTensor that optimizers, state dicts and checkpoints see.

Note [Uneven shards]
A rank holds whole rows of a parameter, possibly none, as the layout says. A DTensor with `Shard(0)` describes that for
pointwise operations and norms, but its own arithmetic assumes even chunks: `full_tensor()` would fail and
torch.distributed.checkpoint would take wrong offsets. So `full_tensor`, `redistribute` and the checkpoint protocol
(`__create_chunk_list__` and its kin, which DTensor asks of its local tensor first) are attached per tensor from the
layout, by `attach`, to the parameter, to its `.grad` and to what `state_dict()` returns.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from megatron.fsdp.collectives import all_gather_single
from megatron.fsdp.layout import GroupLayout, RowRange


@dataclass(frozen=True)
class Chunk:
    """A box of the global tensor held here: offsets in the global and in the local tensor, and its sizes."""

    global_offsets: tuple[int, ...]
    local_offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Location:
    """Where a parameter of this rank (before FSDP cuts it) lies in the model: name, global shape, boxes."""

    name: str
    global_shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...]) -> Location:
        """The location of a parameter that only FSDP cuts."""
        zeros = (0,) * len(shape)
        return cls(name, tuple(shape), (Chunk(zeros, zeros, tuple(shape)),))

    def rows(self, rows: RowRange) -> list[Chunk]:
        """Return the boxes of this location that lie in local rows `rows`, relative to those rows."""
        if not self.global_shape:
            return list(self.chunks)
        boxes = []
        for chunk in self.chunks:
            low = max(chunk.local_offsets[0], rows.start)
            high = min(chunk.local_offsets[0] + chunk.sizes[0], rows.stop)
            if low < high:
                shift = low - chunk.local_offsets[0]
                boxes.append(
                    Chunk(
                        (chunk.global_offsets[0] + shift, *chunk.global_offsets[1:]),
                        (low - rows.start, *chunk.local_offsets[1:]),
                        (high - low, *chunk.sizes[1:]),
                    )
                )
        return boxes


@dataclass(frozen=True)
class ShardInfo:
    """What a sharded tensor needs to know of its layout.

    Attributes:
        name: of the parameter, for messages.
        shape: of the parameter before FSDP cuts it.
        layout: of the parameter's group, from which anybody's rows follow; None: not sharded.
        index: of the parameter in the layout.
        shard: this rank's shard number.
        groups: (process group or None, size) from the innermost gather to the outermost; empty: not sharded.
        location: place of the parameter in the model.
    """

    name: str
    shape: tuple[int, ...]
    layout: GroupLayout | None
    index: int
    shard: int
    groups: tuple[tuple[dist.ProcessGroup | None, int], ...]
    location: Location

    @functools.cached_property
    def rows(self) -> RowRange:
        """This rank's rows."""
        assert self.layout is not None
        return self.layout.rows(self.index, self.shard)

    def all_rows(self) -> list[RowRange]:
        """The rows of every shard, in shard order (work that grows with the world)."""
        assert self.layout is not None
        return [self.layout.rows(self.index, shard) for shard in range(self.layout.num_shards)]

    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's part."""
        return (self.rows.num_rows, *self.shape[1:]) if self.shape and self.groups else self.shape

    def chunks(self) -> list[Chunk]:
        """Boxes of the global tensor that this rank's part covers."""
        if not self.groups:
            return list(self.location.chunks)
        return self.location.rows(self.rows)


def make_dtensor(
    local: Tensor, info: ShardInfo, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> DTensor:
    """Return the DTensor of `info` around `local`, without communication."""
    stride, step = [], 1
    for size in reversed(info.shape):
        stride.append(step)
        step *= max(size, 1)
    meta = TensorMeta(torch.Size(info.shape), tuple(reversed(stride)), local.dtype)
    spec = DTensorSpec(mesh, placements, tensor_meta=meta)
    return attach(DTensor(local, spec, requires_grad=False), info)


def make_parameter(
    local: Tensor, info: ShardInfo, mesh: DeviceMesh, placements: tuple[Placement, ...], requires_grad: bool
) -> nn.Parameter:
    """Return the sharded parameter of `info` around `local`."""
    parameter = nn.Parameter(make_dtensor(local, info, mesh, placements), requires_grad=requires_grad)
    attach(parameter, info)
    return parameter


def attach(tensor: Any, info: ShardInfo) -> Any:
    """Give `tensor` (a DTensor with the layout of `info`) the methods of Note [Uneven shards]; returns it."""
    local = tensor._local_tensor
    # Weak references: a tensor whose attributes refer to it would only go with Python's cycle collector.
    weak, weak_local = weakref.ref(tensor), weakref.ref(local)
    local.__create_chunk_list__ = functools.partial(_chunk_list, info)
    local.__create_write_items__ = functools.partial(_write_items, info, weak_local)
    local.__get_tensor_shard__ = functools.partial(_tensor_shard, info, weak_local)
    tensor.full_tensor = functools.partial(_full_tensor, weak, info)
    tensor.redistribute = functools.partial(_redistribute, weak, info)
    tensor.shard_info = info
    return tensor


def gather_full(local: Tensor, info: ShardInfo) -> Tensor:
    """Return the whole (data-parallel) tensor of which `local` is this rank's part; collective over its groups."""
    if not info.groups:
        return local.clone()
    all_rows = info.all_rows()
    most = max(rows.num_rows for rows in all_rows)
    padded = local.new_zeros((most, *info.shape[1:]))
    padded[: info.rows.num_rows] = local
    parts = padded.unsqueeze(0)
    for group, size in info.groups:
        if size > 1:
            gathered = parts.new_empty((size * parts.shape[0], *parts.shape[1:]))
            all_gather_single(gathered, parts.contiguous(), group=group)
            parts = gathered
    full = local.new_empty(info.shape)
    for part, rows in zip(parts, all_rows, strict=True):
        full[rows.start : rows.stop] = part[: rows.num_rows]
    return full


def _full_tensor(weak: weakref.ref[Any], info: ShardInfo, *, grad_placements: object = None) -> Tensor:
    with torch.no_grad():
        return gather_full(weak()._local_tensor, info)  # type: ignore[union-attr]


def _redistribute(
    weak: weakref.ref[Any],
    info: ShardInfo,
    device_mesh: Any = None,
    placements: Any = None,
    **_options: object,
) -> Any:
    if placements is not None and all(placement.is_replicate() for placement in placements):
        mesh = weak().device_mesh  # type: ignore[union-attr]
        return DTensor.from_local(_full_tensor(weak, info), mesh, list(placements), run_check=False)
    raise NotImplementedError(
        f"redistribute() of {info.name}: its shards are cut at rows of a flat buffer and not in even chunks; "
        f"use full_tensor() and distribute that"
    )


def _chunk_list(info: ShardInfo) -> list[Any]:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [
        ChunkStorageMetadata(offsets=torch.Size(chunk.global_offsets), sizes=torch.Size(chunk.sizes))
        for chunk in info.chunks()
    ]


def _write_items(info: ShardInfo, weak: weakref.ref[Tensor], fqn: str, _object: object) -> list[Any]:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    items = []
    local = weak()
    assert local is not None
    for chunk in info.chunks():
        offsets = torch.Size(chunk.global_offsets)
        items.append(
            WriteItem(
                index=MetadataIndex(fqn, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(chunk.sizes)),
                    properties=TensorProperties.create_from_tensor(local),
                    size=torch.Size(info.location.global_shape),
                ),
            )
        )
    return items


def _tensor_shard(info: ShardInfo, weak: weakref.ref[Tensor], index: Any) -> Tensor:
    local = weak()
    assert local is not None
    for chunk in info.chunks():
        if index.offset is None or tuple(index.offset) == chunk.global_offsets:
            part = local
            for dim, (start, size) in enumerate(zip(chunk.local_offsets, chunk.sizes, strict=True)):
                part = part.narrow(dim, start, size)
            return part
    raise ValueError(f"{info.name}: no part of it at offsets {tuple(index.offset)} on this rank")
