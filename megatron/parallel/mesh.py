"""ParallelMesh: the sizes of all parallel axes, this rank's place on each, and the process groups. The only
creator of process groups.

Note "Making groups": all groups are made together, when the first one is asked for, in the order of AXES. A rank makes
only its own (`use_local_synchronization`), so the work is linear in the number of axes whatever the world size; the
communicators behind them are NCCL's to make on first use. Together, because torch derives the name under which the
members of a group meet from the number of groups each of them has made: ranks that asked for different axes (other
pipeline stages, say) would never meet. For the same reason `partition` makes one group on every rank. Where the
default group is bound to a device, NCCL makes groups by splitting, which is collective over the world: there every
group is made by everybody.

Note "Shared groups": axes of one FAMILY with the same members share a group. Activations (tp, cp, pp, ep, etp) never
share one with parameters and gradients, whose traffic they would wait for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from megatron.parallel.communicators import CommunicatorOptions
from megatron.parallel.layout import AXES, ParallelSizes, all_groups, axis_rank, group_ranks

__all__ = ["AXES", "ParallelMesh", "ParallelSizes"]

# Axes that share a group where they have the same members (note "Shared groups").
FAMILY = {axis: axis for axis in ("tp", "cp", "pp", "ep", "etp")}
FAMILY |= {axis: "parameters" for axis in AXES if axis == "fsdp" or axis.startswith(("dp", "edp"))}
FAMILY |= {axis: "reports" for axis in AXES if axis not in FAMILY}

_Key = tuple[str, tuple[int, ...]]


class ParallelMesh:
    """All parallel axes of a run, as seen from one rank.

    Args:
        sizes: of the axes; their product must be the world size.
        device_type: "cpu" or "cuda", for `device_mesh`.
        rank: this rank; default: of the default process group. With an explicit rank the mesh can be read on
            paper (size, rank, ranks) without torch.distributed.
        communicators: options of NCCL's communicators, by axis.

    Raises ValueError where the product of the sizes is not the world size.
    """

    def __init__(
        self,
        sizes: ParallelSizes,
        device_type: str = "cpu",
        rank: int | None = None,
        communicators: Mapping[str, CommunicatorOptions] | None = None,
    ) -> None:
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
        self._groups: dict[_Key, ProcessGroup] = {}
        self._communicators = communicators or {}

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

    def partition(self, axis: str, blocks: Sequence[Sequence[int]]) -> ProcessGroup | None:
        """Cut the groups of `axis` into blocks of positions; give the group of this rank's block, None if alone.

        blocks: hold every position of the axis once. Every rank must ask, with the same blocks, at the same point
        of the program (note "Making groups").
        """
        assert sorted(p for block in blocks for p in block) == list(range(self.size(axis))), (axis, blocks)
        mine = next(block for block in blocks if self.rank(axis) in block)
        if len(blocks) == 1:
            return self.group(axis)
        key = (axis, tuple(position for block in blocks for position in (*block, -1)))
        if key not in self._groups:
            self._make_all(axis)
            cut = blocks if _splits_communicators() else [mine]
            whole = all_groups(self.sizes, axis) if _splits_communicators() else [self.ranks(axis)]
            self._groups[key] = self._make(
                [[ranks[p] for p in sorted(b)] for ranks in whole for b in cut], axis
            )
        return self._groups[key] if len(mine) > 1 else None

    def subgroup(self, axis: str, positions: Sequence[int]) -> ProcessGroup | None:
        """Group of the ranks at `positions` of `axis` (first and last stage, say); None for others and where alone.

        Every rank must ask, as for `partition`.
        """
        chosen = sorted(set(positions))
        rest = [position for position in range(self.size(axis)) if position not in chosen]
        group = self.partition(axis, [block for block in (chosen, rest) if block])
        return group if self.rank(axis) in chosen else None

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

    def world_on_cpu(self) -> ProcessGroup | None:
        """A new group of all ranks for work on the CPU beside training (saving); None for one rank. Every rank must
        ask, at the same point of the program.
        """
        return None if self.sizes.world == 1 else dist.new_group(backend="gloo", group_desc="world on CPU")

    def _group(self, axis: str) -> ProcessGroup:
        self._make_all(axis)
        return self._groups[self._key(axis)]

    def _key(self, axis: str) -> _Key:
        """Which axes share a group: their family and the members of rank 0's group, the same question on every rank."""
        pattern = tuple(group_ranks(self.sizes, 0, axis))
        return ("alone" if len(pattern) == 1 else FAMILY[axis], pattern)

    def _make_all(self, wanted: str) -> None:
        if self._groups:
            return
        if not dist.is_initialized():
            raise RuntimeError(
                f"axis {wanted} of size {self.size(wanted)} needs torch.distributed.init_process_group"
            )
        for axis in AXES:
            key = self._key(axis)
            if key not in self._groups:
                whole = key == ("reports", tuple(range(self.sizes.world)))
                self._groups[key] = _world_group() if whole else self._make_axis(axis)

    def _make_axis(self, axis: str) -> ProcessGroup:
        every = _splits_communicators()
        return self._make(all_groups(self.sizes, axis) if every else [self.ranks(axis)], axis)

    def _make(self, groups: list[list[int]], axis: str) -> ProcessGroup:
        """Make groups of these global ranks; return the one that this rank is in. Messages call them by the axis."""
        local = not _splits_communicators()
        made = []
        for ranks in groups:
            options = self._options(axis)
            group = dist.new_group(
                ranks, use_local_synchronization=local, group_desc=axis, pg_options=options
            )
            made.append((ranks, group))
        return next(group for ranks, group in made if self.global_rank in ranks)

    def _options(self, axis: str) -> object | None:
        """What NCCL is told for a group of `axis`; None on other backends and for the defaults."""
        wanted = self._communicators.get(axis)
        if wanted is None or "nccl" not in dist.get_backend():
            return None
        return wanted.apply(dist.ProcessGroupNCCL.Options())


def _splits_communicators() -> bool:
    return dist.group.WORLD is not None and dist.group.WORLD.bound_device_id is not None


def _world_group() -> ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group
