"""All flags, one module per group. Plain data; megatron/train/arguments/parse.py turns it into a parser."""

from __future__ import annotations

import functools
from types import MappingProxyType

from megatron.train.arguments.flag import Flag
from megatron.train.arguments.tables import (
    checkpoint,
    cluster,
    data,
    determinism,
    distillation,
    extras,
    fsdp,
    hybrid,
    inference,
    kernels,
    learning_rate,
    legacy,
    logging,
    mla,
    model,
    moe,
    moe_dispatch,
    optimizer,
    parallel,
    positions,
    precision,
    profiling,
    recompute,
    reinforcement,
    restart,
    retrieval,
    tokenizer,
    training,
    variants,
    vision,
)

_MODULES = (
    model,
    variants,
    positions,
    mla,
    moe,
    moe_dispatch,
    parallel,
    fsdp,
    training,
    recompute,
    optimizer,
    learning_rate,
    precision,
    data,
    tokenizer,
    checkpoint,
    logging,
    profiling,
    determinism,
    cluster,
    kernels,
    legacy,
    inference,
    reinforcement,
    vision,
    retrieval,
    hybrid,
    distillation,
    restart,
    extras,
)

GROUPS: MappingProxyType[str, tuple[Flag, ...]] = MappingProxyType(
    {module.TITLE: module.FLAGS for module in _MODULES}
)


@functools.cache
def flags() -> tuple[Flag, ...]:
    """Every flag, in the order of the groups."""
    return tuple(flag for members in GROUPS.values() for flag in members)


@functools.cache
def flags_by_dest() -> MappingProxyType[str, tuple[Flag, ...]]:
    """Flags by destination; two flags may share one."""
    result: dict[str, tuple[Flag, ...]] = {}
    for flag in flags():
        result[flag.dest] = (*result.get(flag.dest, ()), flag)
    return MappingProxyType(result)
