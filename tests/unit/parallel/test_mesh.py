"""ParallelMesh: groups on real ranks, and on thousands of fake ones."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.parallel.layout import AXES, ParallelSizes
from megatron.parallel.mesh import ParallelMesh
from tests.pool import run_ranks

SIZES = ParallelSizes(tensor=2, pipeline=1, context=1, data=2, data_outer=2, expert=2)


def sums_over_axes(rank: int, world_size: int) -> dict[str, Any]:
    """Sum of global ranks over every axis's group, and what the meshes hold."""
    mesh = ParallelMesh(SIZES)
    sums = {}
    for axis in AXES:
        group = mesh.group(axis)
        total = torch.tensor([rank])
        if group is not None:
            assert group is mesh.group(axis)
            assert (group.size(), group.rank()) == (mesh.size(axis), mesh.rank(axis))
            dist.all_reduce(total, group=group)
        sums[axis] = (int(total), sum(mesh.ranks(axis)), group is None)
    device_mesh = mesh.device_mesh("dp_outer", "fsdp")
    return {
        "sums": sums,
        "mesh": (device_mesh.mesh.tolist(), device_mesh.mesh_dim_names),
        "flat": mesh.device_mesh("fsdp").mesh.tolist(),
        "coordinate": device_mesh.get_coordinate(),
    }


def test_groups_hold_the_right_ranks() -> None:
    for rank, result in enumerate(run_ranks(sums_over_axes, 4)):
        for axis, (got, expected, alone) in result["sums"].items():
            assert got == expected, axis
            assert alone == (SIZES.size(axis) == 1), axis
        tp = rank % 2
        assert result["mesh"] == ([[tp], [2 + tp]], ("dp_outer", "fsdp"))
        assert list(result["coordinate"]) == [rank // 2, 0]
        assert result["flat"] == [rank]


def different_axes_by_stage(rank: int, world_size: int) -> int:
    """Only the first stage asks for dp, only the last for cp; first and last share a group."""
    mesh = ParallelMesh(ParallelSizes(pipeline=4, data=2))
    total = torch.tensor([rank])
    if mesh.rank("pp") == 0:
        dist.all_reduce(total, group=mesh.group("dp"))
    ends = mesh.subgroup("pp", (0, 3))
    assert (ends is None) == (mesh.rank("pp") in (1, 2))
    if ends is not None:
        dist.all_reduce(total, group=ends)
    return int(total)


def test_stages_need_not_agree_on_what_they_use() -> None:
    results = run_ranks(different_axes_by_stage, 8)
    assert results == [1 + 6, 1 + 7, 2, 3, 4, 5, 1 + 6, 1 + 7]


def blocks_of_an_axis(rank: int, world_size: int) -> list[list[int] | None]:
    """Members of this rank's block of tp cut three ways, and of the whole axis as one block."""
    mesh = ParallelMesh(ParallelSizes(tensor=4, data=2))
    groups = [mesh.partition("tp", [(0, 2), (1,), (3,)]), mesh.partition("tp", [range(4)])]
    return [None if group is None else dist.get_process_group_ranks(group) for group in groups]


def test_partition_of_an_axis() -> None:
    results = run_ranks(blocks_of_an_axis, 8)
    for first in (0, 4):
        whole = list(range(first, first + 4))
        assert results[first] == results[first + 2] == [[first, first + 2], whole]
        assert results[first + 1] == results[first + 3] == [None, whole]


def shared_groups(rank: int, world_size: int) -> dict[str, str]:
    """Name of each axis's group, dp 2 x ep 2 over all ranks."""
    mesh = ParallelMesh(ParallelSizes(data=4, expert=4))
    return {axis: mesh.group(axis).group_name for axis in ("dp", "fsdp", "dp_cp", "ep", "world")}


def test_parameters_share_groups_but_not_with_activations() -> None:
    names = run_ranks(shared_groups, 4)[0]
    assert names["dp"] == names["fsdp"] == names["dp_cp"]
    assert len({names["dp"], names["ep"], names["world"]}) == 3


def wrong_world(rank: int, world_size: int) -> None:
    """A mesh for more ranks than there are."""
    ParallelMesh(ParallelSizes(tensor=2, data=3))


def test_wrong_product_names_the_sizes() -> None:
    with pytest.raises(
        Exception, match=r"tensor=2 \* context=1 \* pipeline=1 \* data=3 = 6, but 2 processes"
    ):
        run_ranks(wrong_world, 2)


def test_one_rank_needs_no_torch_distributed() -> None:
    mesh = ParallelMesh.single()
    assert all(mesh.size(axis) == 1 and mesh.rank(axis) == 0 and mesh.group(axis) is None for axis in AXES)


def test_paper_mesh_has_no_groups() -> None:
    mesh = ParallelMesh(ParallelSizes(tensor=2, data=4), rank=5)
    assert (mesh.rank("tp"), mesh.rank("dp"), mesh.ranks("tp")) == (1, 2, [4, 5])
    with pytest.raises(RuntimeError, match="axis tp of size 2 needs"):
        mesh.group("tp")


_FAKE_WORLD = """
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from megatron.parallel.mesh import AXES, ParallelMesh, ParallelSizes
dist.init_process_group("fake", rank=1234, world_size=8192, store=FakeStore())
sizes = ParallelSizes.of_world(8192, tensor=8, pipeline=8, context=2, data_outer=4, expert=32)
mesh = ParallelMesh(sizes)
made = []
new_group = dist.new_group
dist.new_group = lambda *args, **kwargs: made.append(1) or new_group(*args, **kwargs)
groups = [mesh.group(axis) for axis in AXES]
shape = mesh.device_mesh("dp_outer", "fsdp").shape
assert shape == (4, sizes.size("fsdp")), shape
print(len(made), sum(group is not None for group in groups))
"""


def test_eight_thousand_ranks_make_only_their_own_groups() -> None:
    done = subprocess.run([sys.executable, "-c", _FAKE_WORLD], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    made, used = map(int, done.stdout.split())
    assert made <= used <= len(AXES), "a group more than axes have members"
