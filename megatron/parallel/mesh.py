"""ParallelMesh: the sizes of all parallel axes, this rank's place on each, and the process groups. The only
creator of process groups.

Note "Making groups": a group is made when it is first asked for, and by its members alone
(`use_local_synchronization`), so that a rank makes as many groups as it uses, whatever the world size, and
ranks of different pipeline stages or experts need not agree on what they use. Members of one group must ask
for it at the same point of the program, as with any collective. Where the default group is bound to a device,
NCCL makes groups by
splitting, which is collective over the world: there every group of the axis is made by everybody.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from megatron.parallel.layout import AXES, ParallelSizes, all_groups, axis_rank, group_ranks

__all__ = ["AXES", "ParallelMesh", "ParallelSizes"]


class ParallelMesh:
    """All parallel axes of a run, as seen from one rank.

    Args:
        sizes: of the axes; their product must be the world size.
        device_type: "cpu" or "cuda", for `device_mesh`.
        rank: this rank; default: of the default process group. With an explicit rank the mesh can be read on
            paper (size, rank, ranks) without torch.distributed.

    Raises ValueError where the product of the sizes is not the world size.
    """

    def __init__(self, sizes: ParallelSizes, device_type: str = "cpu", rank: int | None = None) -> None:
        self.sizes = sizes
        self.device_type = device_type
        if rank is None:
            rank = dist.get_rank() if dist.is_initialized() else 0
            world = dist.get_world_size() if dist.is_initialized() else 1
            if world != sizes.world:
                raise ValueError(
                    f"tensor={sizes.tensor} * context={sizes.context} * pipeline={sizes.pipeline} * "
                    f"data={sizes.data} = {sizes.world}, but {world} processes run"
                )
        self.global_rank = rank
        self._groups: dict[tuple[int, ...] | str, ProcessGroup] = {}

    @classmethod
    def single(cls, device_type: str = "cpu") -> ParallelMesh:
        """The mesh of one rank; needs no torch.distributed."""
        return cls(ParallelSizes(), device_type, rank=0)

    def size(self, axis: str) -> int:
        """Number of ranks in a group of `axis` (one of AXES)."""
        return self.sizes.size(axis)

    def rank(self, axis: str) -> int:
        """Position of this rank in its group of `axis`."""
        return axis_rank(self.sizes, self.global_rank, axis)

    def ranks(self, axis: str) -> list[int]:
        """Global ranks of this rank's group of `axis`, by position."""
        return group_ranks(self.sizes, self.global_rank, axis)

    def group(self, axis: str) -> ProcessGroup | None:
        """This rank's group of `axis`, made on first use (note "Making groups"); None where it has one
        member.
        """
        return None if self.size(axis) == 1 else self._group(axis)

    def subgroup(self, axis: str, positions: Sequence[int]) -> ProcessGroup | None:
        """Group of the ranks at `positions` of `axis` (such as first and last stage); None for non-members
        and one member.

        Members must ask at the same point of the program.
        """
        if self.rank(axis) not in positions or len(set(positions)) == 1:
            return None
        members = tuple(sorted(self.ranks(axis)[position] for position in set(positions)))
        if members not in self._groups:
            self._groups[members] = self._new_group(list(members))
        return self._groups[members]

    def device_mesh(self, *axes: str) -> DeviceMesh:
        """DeviceMesh over one or two axes, slowest first, dims named by axis: ("fsdp",), ("dp_outer",
        "fsdp"), ("edp_outer", "edp_shard").
        """
        groups = [self._group(axis) for axis in axes]
        if len(axes) == 1:
            return DeviceMesh.from_group(groups[0], self.device_type, mesh_dim_names=axes)
        outer, inner = axes
        starts = self.ranks(outer)
        rows = [group_ranks(self.sizes, start, inner) for start in starts]
        return DeviceMesh.from_group(groups, self.device_type, mesh=torch.tensor(rows), mesh_dim_names=axes)

    def _group(self, axis: str) -> ProcessGroup:
        if axis not in self._groups:
            if not dist.is_initialized():
                raise RuntimeError(
                    f"axis {axis} of size {self.size(axis)} needs torch.distributed.init_process_group"
                )
            self._groups[axis] = self._make_axis(axis)
        return self._groups[axis]

    def _make_axis(self, axis: str) -> ProcessGroup:
        if _splits_communicators():
            for ranks in all_groups(self.sizes, axis):
                group = dist.new_group(ranks)
                if self.global_rank in ranks:
                    mine = group
            return mine
        return self._new_group(self.ranks(axis))

    def _new_group(self, ranks: list[int]) -> ProcessGroup:
        return dist.new_group(ranks, use_local_synchronization=not _splits_communicators())


def _splits_communicators() -> bool:
    return dist.group.WORLD is not None and dist.group.WORLD.bound_device_id is not None
