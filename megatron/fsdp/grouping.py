"""Modules -> units -> parameter groups.

A unit's parameters form groups by placement, dtypes, requires_grad and row width (layout.py, Note [Shards are cut at
rows]). requires_grad at wrap time is only a hint that keeps frozen weights out of gradient buffers; it may change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from megatron.fsdp.collectives import mesh_communicators
from megatron.fsdp.layout import GroupLayout, atomic_layout, choose_row_widths, row_layout
from megatron.fsdp.main_grad import is_te_ops
from megatron.fsdp.managed import ParameterSource
from megatron.fsdp.param_group import GroupSpec, ParamGroup
from megatron.fsdp.precision import GroupPrecision
from megatron.fsdp.shard_info import Location
from megatron.fsdp.strategy import OuterStrategy, ShardingStrategy, placements


@dataclass(frozen=True)
class DataParallelPlacement:
    """Over which ranks a parameter is data parallel.

    Attributes:
        shard_mesh: 1-D mesh of the inner axis.
        outer_mesh: 1-D mesh of the outer axis (HSDP, HFSDP), None where there is none.
        gradient_divisor: gradients, summed over both axes, are divided by it.
    """

    shard_mesh: DeviceMesh
    outer_mesh: DeviceMesh | None
    gradient_divisor: float


PlacementFor = Callable[[str, nn.Parameter], DataParallelPlacement]
Locate = Callable[[str, nn.Parameter], Location]


@dataclass(frozen=True)
class GroupingOptions:
    """How parameters become groups.

    Attributes:
        strategy, outer_strategy: of sharding.
        precision_of: dtypes of a parameter.
        placement_for: mesh of a parameter.
        locate: place of a parameter in the model; None: FSDP alone cuts it.
        tensor_atomic: never cut a parameter (for optimizers that need whole matrices).
        device: of the buffers.
    """

    strategy: ShardingStrategy
    outer_strategy: OuterStrategy
    precision_of: Callable[[str, nn.Parameter], GroupPrecision]
    placement_for: PlacementFor
    locate: Locate | None
    tensor_atomic: bool
    device: torch.device


class GroupBuilder:
    """Builds parameter groups; keeps the balance of atomic layouts over all that it built."""

    def __init__(self, options: GroupingOptions) -> None:
        self.options = options
        self._load: dict[tuple, list[int]] = {}

    def build(self, sources: Sequence[ParameterSource]) -> list[ParamGroup]:
        """Return the groups of one unit's parameters.

        Raises:
            ValueError: a parameter that is managed already, or whose dtype or shape cannot be.
        """
        buckets: dict[tuple, list[ParameterSource]] = {}
        details: dict[tuple, tuple[DataParallelPlacement, GroupPrecision]] = {}
        for source in sources:
            parameter = source.parameter
            _check(source)
            if self.options.locate is not None:
                source.location = self.options.locate(source.name, parameter)
            source.overwrite_allowed = not any(is_te_ops(module) for module, _ in source.sites)
            placement = self.options.placement_for(source.name, parameter)
            precision = self.options.precision_of(source.name, parameter)
            key = (
                *_mesh_key(placement),
                placement.gradient_divisor,
                precision,
                parameter.requires_grad,
                parameter.ndim == 0,
            )
            buckets.setdefault(key, []).append(source)
            details[key] = (placement, precision)
        groups = []
        for key, members in buckets.items():
            groups += self._build_bucket(members, *details[key])
        return groups

    def _build_bucket(
        self, members: list[ParameterSource], placement: DataParallelPlacement, precision: GroupPrecision
    ) -> list[ParamGroup]:
        outer_mesh = placement.outer_mesh
        outer_group = None if outer_mesh is None else outer_mesh.get_group()
        comms = mesh_communicators(placement.shard_mesh.get_group(), outer_group)
        strategy, outer = self.options.strategy, self.options.outer_strategy
        on_both = placements(strategy, outer, comms.gather.size, comms.outer_gather.size).outer_sharded
        if members[0].parameter.ndim == 0:  # nothing to cut
            strategy, outer = ShardingStrategy.NO_SHARD, OuterStrategy.NO_SHARD
        placed = placements(strategy, outer, comms.gather.size, comms.outer_gather.size)
        num_shards = comms.gather.size * (comms.outer_gather.size if placed.outer_sharded else 1)
        shapes = [tuple(source.parameter.shape) for source in members]
        groups = []
        for indices, layout in self._layouts(shapes, num_shards, precision.itemsize, _mesh_key(placement)):
            spec = GroupSpec(
                mesh=_dtensor_mesh(placement, on_both),  # one for all parameters, which meet in norms
                placements=placed,
                precision=precision,
                layout=layout,
                gradient_divisor=placement.gradient_divisor,
                device=self.options.device,
            )
            groups.append(ParamGroup([members[i] for i in indices], spec, comms))
        return groups

    def _layouts(
        self, shapes: list[tuple[int, ...]], num_shards: int, itemsize: int, mesh_key: tuple
    ) -> list[tuple[list[int], GroupLayout]]:
        if self.options.tensor_atomic:
            load = self._load.setdefault(mesh_key, [0] * num_shards)
            return [(list(range(len(shapes))), atomic_layout(shapes, num_shards, itemsize, load))]
        by_width: dict[int, list[int]] = {}
        for index, width in enumerate(choose_row_widths(shapes)):
            by_width.setdefault(width, []).append(index)
        return [
            (indices, row_layout([shapes[i] for i in indices], width, num_shards, itemsize))
            for width, indices in by_width.items()
        ]


def _check(source: ParameterSource) -> None:
    parameter = source.parameter
    if getattr(parameter, "_fsdp_managed", None) is not None:
        raise ValueError(
            f"parameter {source.name} is managed by FSDP already: a module was wrapped twice, or a parameter is in "
            f"two units. Wrap each module once, inner modules before outer ones"
        )
    if isinstance(parameter, DTensor):
        raise ValueError(
            f"parameter {source.name} is a DTensor on mesh {parameter.device_mesh}; FSDP shards plain tensors: use "
            f"layers that keep their tensor-parallel part as one (megatron.parallel), or ignored_params"
        )
    if not parameter.is_floating_point():
        raise ValueError(
            f"parameter {source.name} has dtype {parameter.dtype}; FSDP shards floating-point ones only: register it "
            f"as a buffer, or leave it alone with ignored_params"
        )
    if not parameter.is_contiguous() and not parameter.is_meta:
        parameter.data = parameter.data.contiguous()


def _mesh_key(placement: DataParallelPlacement) -> tuple:
    outer = placement.outer_mesh
    return (placement.shard_mesh.get_group(), None if outer is None else outer.get_group())


def _dtensor_mesh(placement: DataParallelPlacement, outer_sharded: bool) -> DeviceMesh:
    """Mesh of the sharded parameters: both axes only where both cut."""
    if not outer_sharded:
        return placement.shard_mesh
    assert placement.outer_mesh is not None
    names = (placement.outer_mesh.mesh_dim_names, placement.shard_mesh.mesh_dim_names)
    root = placement.shard_mesh._get_root_mesh()
    if names[0] and names[1] and root.mesh_dim_names:
        both = (names[0][0], names[1][0])
        if root.mesh_dim_names == both:
            return root
        if [name for name in root.mesh_dim_names if name in both] == list(both):
            return root[both]
    raise ValueError(
        "outer strategy optim needs shard_mesh and outer_mesh to be slices of one DeviceMesh, outer before shard, for "
        "example mesh['dp_outer'] and mesh['fsdp']"
    )
