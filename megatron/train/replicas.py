"""Copies of a weight on several data-parallel ranks must be alike: --check-weight-hash-across-dp-replicas-interval.

Note "What has copies". Without sharding, and over the outer axis of a hybrid one, ranks hold the same main parameters,
each updated by its own rank. Under ZeRO one rank updates a piece and the others only ever get its values: there is
nothing to compare.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from megatron.parallel.annotate import annotation_of
from megatron.parallel.flight import all_gather_objects
from megatron.parallel.mesh import ParallelMesh
from megatron.train.errors import RunStopped
from megatron.train.grad_norm import local_tensor

Key = tuple[str, tuple[int, ...]]
"""Name, and the shard's coordinates."""


def weight_hashes(named_parameters: Iterable[tuple[str, Tensor]], *, expert: bool) -> dict[Key, int]:
    """A checksum of each piece of this rank's dense (or expert) parameters: equal keys must have equal values."""
    found: dict[Key, int] = {}
    for name, parameter in named_parameters:
        if annotation_of(parameter).expert is not expert:
            continue
        shard: tuple[int, ...] = ()
        if isinstance(parameter, DTensor):
            coordinate: Sequence[int] = parameter.device_mesh.get_coordinate() or ()
            pairs = zip(parameter.placements, coordinate, strict=True)
            shard = tuple(at for placement, at in pairs if not isinstance(placement, Replicate))
        found[name, shard] = _checksum(local_tensor(parameter))
    return found


def check_replicas(named_parameters: Iterable[tuple[str, Tensor]], mesh: ParallelMesh) -> None:
    """Compare the copies; collective. Raises RunStopped that names the parameter and the ranks that differ."""
    named = list(named_parameters)
    for axis, expert in (("dp_cp", False), ("edp", True)):
        group = mesh.group(axis)
        if group is None:
            continue
        everyone = all_gather_objects(weight_hashes(named, expert=expert), group, "copies of weights")
        _compare(everyone, dist.get_process_group_ranks(group))


def _compare(everyone: list[dict[Key, int]], ranks: list[int]) -> None:
    first: dict[Key, tuple[int, int]] = {}
    for rank, hashes in zip(ranks, everyone, strict=True):
        for key, value in hashes.items():
            other, expected = first.setdefault(key, (rank, value))
            if value != expected:
                raise RunStopped(
                    f"--check-weight-hash-across-dp-replicas-interval: ranks {other} and {rank} hold different copies "
                    f"of {key[0]}; one of the machines is at fault: start again from the last "
                    "checkpoint without it"
                )


def _checksum(tensor: Tensor) -> int:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(flat.cpu().numpy().data)
