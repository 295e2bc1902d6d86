"""A checkpoint of ours written layer by layer, a file for each: torch holds what goes into a file until it is full."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from megatron.train.checkpoint import RunRecord, Target
from megatron.train.checkpoint.plan import local_plan, merge_plans
from megatron.train.checkpoint.save import publish
from megatron.train.checkpoint.shard import live_source, write_shard

Item = TypeVar("Item")
_LAYER = re.compile(r"(?:^|\.)((?:decoder|mtp)\.layers\.\d+)\.")
_PART_BYTES = 2 << 30


def in_parts(
    items: Iterable[Item], name_of: Callable[[Item], str], bytes_of: Callable[[Item], int]
) -> Iterator[list[Item]]:
    """Neighbours of one layer together, but not more than 2 GiB of them."""
    part: list[Item] = []
    size = 0
    for item in items:
        if part and (
            _layer(name_of(item)) != _layer(name_of(part[0])) or size + bytes_of(item) > _PART_BYTES
        ):
            yield part
            part, size = [], 0
        part.append(item)
        size += bytes_of(item)
    if part:
        yield part


def _layer(name: str) -> str:
    """The layer of a tensor's name or key; what belongs to none is alone."""
    found = _LAYER.search(name)
    return found[1] if found else name


def save_in_parts(root: Path, tensors: Mapping[str, Tensor], record: RunRecord) -> None:
    """What `save_checkpoint` does on one process, a part at a time. Raises OSError if it cannot be written."""
    ordered = sorted(tensors.items(), key=lambda item: _layer(item[0]))
    parts = [dict(part) for part in in_parts(ordered, lambda item: item[0], lambda item: item[1].nbytes)]
    target = Target(root, record)
    target.partial.mkdir(parents=True)
    plans, metadata = merge_plans([local_plan(part) for part in parts])
    written = [
        write_shard(target.partial, plan, live_source(part)) for plan, part in zip(plans, parts, strict=True)
    ]
    publish(target, metadata, written)
