"""What is known of a sharded tensor: its place in the model, its rows on every rank, and its checkpoint items."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

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
        groups: (process group, size) of each axis of the tensor's mesh; empty: not sharded. None for the group: the
            mesh's own (after unpickling), or an axis of one rank.
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

    @functools.cached_property
    def is_even(self) -> bool:
        """Whether the rows are the even chunks, one a rank, that DTensor assumes."""
        if not self.groups or not self.shape:
            return True
        if len(self.groups) > 1:
            return False
        each = -(-self.shape[0] // self.groups[0][1])
        for shard, rows in enumerate(self.all_rows()):
            start, stop = (min(each * i, self.shape[0]) for i in (shard, shard + 1))
            if rows.num_rows != stop - start or (rows.num_rows and rows.start != start):
                return False
        return True

    def is_cut_as(self, other: ShardInfo) -> bool:
        """Whether tensors of both have the same shape and the same rows on every rank."""
        if self is other:
            return True
        if self.shape != other.shape or len(self.groups) != len(other.groups):
            return False
        if not self.groups:
            return True
        same = (self.index, self.shard) == (other.index, other.shard)
        return same and (self.layout is other.layout or self.layout == other.layout)

    def check_is_of(self, own: ShardInfo) -> None:
        """Refuse a tensor of another rank where `own` is the place of this rank's.

        Raises:
            ValueError: names the parameter and the shards.
        """
        same = self.layout == own.layout and self.index == own.index
        if self.groups and own.groups and same and self.shard != own.shard:
            raise ValueError(
                f"{own.name}: the state has the rows of shard {self.shard} of {len(self.all_rows())}, this rank has "
                f"shard {own.shard}; load on each rank what it saved, or save and load the whole (full_state_dict)"
            )

    def row_slice(self) -> slice:
        """This rank's rows of a whole tensor."""
        return slice(self.rows.start, self.rows.stop) if self.groups and self.shape else slice(None)

    def __deepcopy__(self, _memo: dict) -> ShardInfo:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        sizes = tuple((None, size) for _, size in self.groups)
        return ShardInfo, (self.name, self.shape, self.layout, self.index, self.shard, sizes, self.location)

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


def gather_parts(part: Tensor, info: ShardInfo, mesh: DeviceMesh) -> Tensor:
    """Return `part` of every rank that shares the tensor, stacked in the order of shards; collective."""
    parts = part.unsqueeze(0)
    for dim, (group, size) in enumerate(info.groups):
        if size > 1:
            gathered = parts.new_empty((size * parts.shape[0], *parts.shape[1:]))
            all_gather_single(gathered, parts.contiguous(), group=group or mesh.get_group(dim))
            parts = gathered
    return parts


def gather_full(local: Tensor, info: ShardInfo, mesh: DeviceMesh) -> Tensor:
    """Return the whole (data-parallel) tensor of which `local` is this rank's part; collective over its groups."""
    if not info.groups or not info.shape:
        return local.clone()
    all_rows = info.all_rows()
    most = max(rows.num_rows for rows in all_rows)
    padded = local.new_zeros((most, *info.shape[1:]))
    padded[: info.rows.num_rows] = local
    full = local.new_empty(info.shape)
    for part, rows in zip(gather_parts(padded, info, mesh), all_rows, strict=True):
        full[rows.start : rows.stop] = part[: rows.num_rows]
    return full


def chunk_list(info: ShardInfo) -> list[Any]:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [
        ChunkStorageMetadata(offsets=torch.Size(chunk.global_offsets), sizes=torch.Size(chunk.sizes))
        for chunk in info.chunks()
    ]


def write_items(info: ShardInfo, local: Tensor, fqn: str) -> list[Any]:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    items = []
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


def tensor_shard(info: ShardInfo, local: Tensor, index: Any) -> Tensor:
    for chunk in info.chunks():
        if index.offset is None or tuple(index.offset) == chunk.global_offsets:
            part = local
            for dim, (start, size) in enumerate(zip(chunk.local_offsets, chunk.sizes, strict=True)):
                part = part.narrow(dim, start, size)
            return part
    raise ValueError(f"{info.name}: no part of it at offsets {tuple(index.offset)} on this rank")
