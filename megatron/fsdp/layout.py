"""Layout of a parameter group in one flat buffer: offsets, padding, each rank's rows. PURE.

Note [Shards are cut at rows]
A group's parameters lie one after another in a flat buffer, each contiguous and 16-byte aligned. The buffer is cut
into equal shards. A cut may fall inside a parameter but only between two of its rows (slices along dim 0), so that a
rank's part of every parameter is a block of whole rows: optimizers, checkpoints and initialisation see ordinary
tensors. The cut positions must then be multiples of the row width of every parameter in the group, so parameters are
grouped by row width instead of padding all of them to a common multiple (on DeepSeek-V3's dense layer at 256 shards:
0.24 % of padding instead of 36 %). A parameter whose rows are narrower (norm weights, biases) joins a group of wider
rows when its element count is a multiple of that width: it costs no collective of its own.

Everything here is arithmetic on shapes and sizes: every rank knows the whole layout without communication.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class ItemLayout:
    """Place of one parameter: `shape`, `offset` of its first element in the buffer, `row_numel` elements per row."""

    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def row_numel(self) -> int:
        """Elements of one row (slice along dim 0); 1 for an empty parameter."""
        return row_numel(self.shape)


@dataclass(frozen=True)
class RowRange:
    """Rows [start, stop) of a parameter and the offset of `start` inside the shard, in elements."""

    start: int
    stop: int
    shard_offset: int

    @property
    def num_rows(self) -> int:
        """Number of rows, possibly zero."""
        return self.stop - self.start


@dataclass(frozen=True)
class GroupLayout:
    """Layout of a group: `items` in buffer order, `num_shards` equal shards of `shard_numel` elements."""

    items: tuple[ItemLayout, ...]
    num_shards: int
    shard_numel: int

    @property
    def numel(self) -> int:
        """Elements of the whole buffer, padding included."""
        return self.num_shards * self.shard_numel

    @property
    def padding_numel(self) -> int:
        """Elements that belong to no parameter."""
        return self.numel - sum(item.numel for item in self.items)

    def shard_range(self, shard: int) -> tuple[int, int]:
        """Return (start, stop) of shard number `shard`, in elements of the buffer."""
        return shard * self.shard_numel, (shard + 1) * self.shard_numel

    def rows(self, index: int, shard: int) -> RowRange:
        """Return the rows of item `index` that lie in shard number `shard`."""
        item = self.items[index]
        start, stop = self.shard_range(shard)
        low = min(max(item.offset, start), item.offset + item.numel)
        high = max(min(item.offset + item.numel, stop), low)
        width = item.row_numel
        assert (low - item.offset) % width == 0 and (high - item.offset) % width == 0, "a cut inside a row"
        shard_offset = low - start if high > low else 0
        return RowRange((low - item.offset) // width, (high - item.offset) // width, shard_offset)

    def padding_ranges(self) -> list[tuple[int, int]]:
        """Return the (start, stop) ranges of the buffer, in elements, that belong to no parameter."""
        ranges, position = [], 0
        for item in sorted(self.items, key=lambda item: item.offset):
            if item.offset > position:
                ranges.append((position, item.offset))
            position = max(position, item.offset + item.numel)
        if position < self.numel:
            ranges.append((position, self.numel))
        return ranges


def row_numel(shape: Sequence[int]) -> int:
    """Return the elements of one row (slice along dim 0) of a parameter of this shape, at least 1."""
    return max(1, math.prod(shape[1:]))


def choose_row_widths(shapes: Sequence[Sequence[int]]) -> list[int]:
    """Return, for each parameter shape, the row width of the group that it goes to.

    A matrix keeps its own row width. A vector joins the narrowest matrix width that divides its element count, else
    the group of width 1.
    """
    widths = sorted({row_numel(shape) for shape in shapes if len(shape) > 1 and math.prod(shape) > 0})
    chosen = []
    for shape in shapes:
        width = row_numel(shape)
        if len(shape) <= 1:
            numel = math.prod(shape)
            width = next((w for w in widths if numel > 0 and numel % w == 0), 1)
        chosen.append(width)
    return chosen


def row_layout(
    shapes: Sequence[Sequence[int]], row_width: int, num_shards: int, itemsize: int = 4
) -> GroupLayout:
    """Lay out parameters of one row width and cut the buffer into equal shards at rows.

    Args:
        shapes: parameter shapes, in order.
        row_width: elements per row of the group; a multiple of every parameter's own row width.
        num_shards: number of equal shards.
        itemsize: bytes of the smallest element type that the group's buffers use.
    """
    unit = row_width * aligned_rows(row_width, itemsize)
    items, position = [], 0
    for shape in shapes:
        numel = math.prod(shape)
        assert numel % row_width == 0, f"shape {tuple(shape)} has no whole rows of {row_width} elements"
        items.append(ItemLayout(tuple(shape), position))
        position += -(-numel // unit) * unit
    shard_numel = -(-position // (num_shards * unit)) * unit
    return GroupLayout(tuple(items), num_shards, shard_numel)


def atomic_layout(
    shapes: Sequence[Sequence[int]], num_shards: int, itemsize: int = 4, load: list[int] | None = None
) -> GroupLayout:
    """Lay out parameters so that none is cut (for optimizers such as Muon that need whole matrices).

    Each parameter goes, largest first, to the shard with the least elements so far; ties go to the lowest shard.

    Args:
        shapes: parameter shapes, in order.
        num_shards: number of equal shards.
        itemsize: bytes of the smallest element type that the group's buffers use.
        load: elements that each shard holds already from other groups; updated in place, so that the assignment
            is balanced over a whole model.
    """
    align = ALIGNMENT_BYTES // math.gcd(ALIGNMENT_BYTES, itemsize)
    load = [0] * num_shards if load is None else load
    used = [0] * num_shards
    place: dict[int, tuple[int, int]] = {}
    for index in sorted(range(len(shapes)), key=lambda i: (-math.prod(shapes[i]), i)):
        shard = min(range(num_shards), key=lambda s: (load[s], s))
        numel = -(-math.prod(shapes[index]) // align) * align
        place[index] = (shard, used[shard])
        used[shard] += numel
        load[shard] += numel
    shard_numel = max(used)
    items = [
        ItemLayout(tuple(shape), place[i][0] * shard_numel + place[i][1]) for i, shape in enumerate(shapes)
    ]
    return GroupLayout(tuple(items), num_shards, shard_numel)


def aligned_rows(row_width: int, itemsize: int) -> int:
    """Return the least number of rows whose bytes are a multiple of `ALIGNMENT_BYTES`."""
    return ALIGNMENT_BYTES // math.gcd(ALIGNMENT_BYTES, row_width * itemsize)
