"""fully_shard: per-module FSDP with the interface of torch's FSDP2 (torch.distributed.fsdp.fully_shard, torch 2.13)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron.fsdp.grouping import DataParallelPlacement, GroupBuilder, GroupingOptions
from megatron.fsdp.hooks import UnitHooks, wrap_method
from megatron.fsdp.meta import check_initialised
from megatron.fsdp.module import HOOKS_ATTRIBUTE, FSDPModule, fsdp_class, units_below
from megatron.fsdp.precision import GroupPrecision, MixedPrecisionPolicy
from megatron.fsdp.root import (
    SourceCollector,
    device_of,
    make_engine,
    make_unit,
    move_buffers,
    own_modules,
    unit_of,
)
from megatron.fsdp.schedule import Engine
from megatron.fsdp.strategy import OuterStrategy, ShardingStrategy
from megatron.fsdp.unit import Unit

_DEFAULT_POLICY = MixedPrecisionPolicy()


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = _DEFAULT_POLICY,
    offload_policy: Any = None,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    strategy: str | ShardingStrategy = ShardingStrategy.OPTIM_GRADS_PARAMS,
    outer_strategy: str | OuterStrategy = OuterStrategy.NO_SHARD,
) -> Any:
    """Make `module` an FSDP unit in place and return it. Call it on inner modules first, then on the root.

    Args:
        module: a module, or a list of modules that are gathered together.
        mesh: 1-D (shard) or 2-D (replicate, shard) mesh; default: all ranks.
        reshard_after_forward: release parameters after forward; None: for all but the root; a number n: until backward
            each run of n neighbouring ranks keeps the whole, an n-th on each, and backward gathers within it. n divides
            the size of the shard mesh.
        shard_placement_fn: only `Shard(0)` can be; anything else is refused.
        mp_policy: dtypes of computation, reduction and outputs.
        offload_policy: `CPUOffloadPolicy` is refused.
        ignored_params: parameters to leave alone.
        dp_mesh_dims: refused (FSDP2: parameters that are DTensors on a mesh with more axes).
        strategy: our one extra, with `outer_strategy` for the replicate axis of a 2-D mesh.

    Raises:
        ValueError: wrapped twice, a mesh of another shape, an argument that cannot be, naming it.
    """
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    _check_arguments(modules, shard_placement_fn, offload_policy)
    if dp_mesh_dims is not None:
        raise ValueError(
            f"fully_shard: dp_mesh_dims={dp_mesh_dims} is not supported; give mesh= the data-parallel axes"
        )
    modules = _outermost(modules)
    mesh = _default_mesh() if mesh is None else mesh
    _check_mesh(mesh, OuterStrategy.parse(outer_strategy))
    reshard = _reshard_setting(reshard_after_forward, mesh.size(mesh.ndim - 1))
    builder = GroupBuilder(_grouping_options(mesh, mp_policy, strategy, outer_strategy))
    wrapped = [child for each in modules for child in each.modules() if unit_of(child) is not None]
    inside = [(name, child) for each in modules for name, child in own_modules(each, "", wrapped)]
    sources, borrowed = SourceCollector(ignored_params).collect(inside)
    unit = make_unit(type(modules[0]).__name__, tuple(modules), sources, builder)
    for inner in map(unit_of, wrapped):
        if inner is not None and inner.parent is None:
            inner.parent = unit
    unit.borrowed = list(dict.fromkeys(managed.group for managed in borrowed))
    unit.reshard_setting, unit.reshard_to = reshard
    unit.reshard_after_forward = unit.reshard_setting is not False
    hooks = UnitHooks(unit, mp_policy, _ensure_engine)
    hooks.register()
    for each in modules:
        move_buffers(each, builder.options.device, meta_allowed=True)
        each.__dict__[HOOKS_ATTRIBUTE] = hooks
        each.__class__ = fsdp_class(type(each))  # type: ignore[arg-type]
    return module


def _reshard_setting(setting: bool | int | None, num_shards: int) -> tuple[bool | None, int | None]:
    """Return (whether forward releases, None if the root decides; number of ranks that keep a whole, None: all)."""
    if setting is None or isinstance(setting, bool):
        return setting, None
    if not isinstance(setting, int) or setting < 1 or num_shards % setting:
        raise ValueError(
            f"fully_shard: reshard_after_forward={setting!r} does not divide the {num_shards} ranks of the shard mesh; "
            f"use a divisor of that, True or False"
        )
    if setting == 1:
        return False, None  # every rank keeps the whole
    return True, None if setting == num_shards else setting


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make method `method_name` of an FSDP module gather its parameters as forward does; no-op for others."""
    if isinstance(module, FSDPModule):
        wrap_method([module.__dict__[HOOKS_ATTRIBUTE]], module, method_name)


def _check_arguments(modules: list[nn.Module], shard_placement_fn: object, offload_policy: object) -> None:
    if not modules:
        raise ValueError("fully_shard: the list of modules is empty")
    for module in modules:
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
            raise ValueError(f"fully_shard: {type(module).__name__} has no forward; wrap its members")
        if unit_of(module) is not None:
            raise ValueError(
                f"fully_shard: this {type(module).__name__} is wrapped already; wrap each module once"
            )
    if offload_policy is not None and type(offload_policy).__name__ != "OffloadPolicy":
        raise ValueError(
            f"fully_shard: offload_policy {offload_policy!r} is not supported; parameters stay on device"
        )
    if callable(shard_placement_fn):
        for parameter in (parameter for module in modules for parameter in module.parameters()):
            placement = shard_placement_fn(parameter)
            if placement is not None and getattr(placement, "dim", None) != 0:
                raise ValueError(
                    f"fully_shard: shard_placement_fn asks for {placement}; rows (Shard(0)) are all that can be cut"
                )


def _outermost(modules: list[nn.Module]) -> list[nn.Module]:
    """Without those that are inside another one of the list, each once."""
    inside = {id(child) for module in modules for child in module.modules() if child is not module}
    return list({id(module): module for module in modules if id(module) not in inside}.values())


def _check_mesh(mesh: DeviceMesh, outer: OuterStrategy) -> None:
    if mesh.ndim not in (1, 2):
        raise ValueError(f"fully_shard: mesh has {mesh.ndim} dims; use 1-D (shard) or 2-D (replicate, shard)")
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"fully_shard: rank {dist.get_rank()} is not in the mesh of ranks {mesh.mesh.flatten().tolist()}; wrap the "
            f"module with a mesh that contains the ranks that call fully_shard"
        )
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise ValueError("fully_shard: a 2-D mesh needs mesh_dim_names, for example ('replicate', 'shard')")
    if mesh.ndim == 1 and outer is not OuterStrategy.NO_SHARD:
        raise ValueError(
            f"fully_shard: outer_strategy={outer.value!r} needs a 2-D mesh (replicate, shard); this one has one axis"
        )


def _default_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        raise ValueError(
            "fully_shard: no mesh given and torch.distributed is not initialised; initialise it first"
        )
    device = "cuda" if torch.cuda.is_available() and "nccl" in dist.get_backend() else "cpu"
    return init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("fsdp",))


def _grouping_options(
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    strategy: str | ShardingStrategy,
    outer: str | OuterStrategy,
) -> GroupingOptions:
    if mesh.ndim == 1:
        placement = DataParallelPlacement(mesh, None, float(mesh.size()))
    else:
        assert mesh.mesh_dim_names is not None  # checked
        outer_name, inner_name = mesh.mesh_dim_names
        placement = DataParallelPlacement(mesh[inner_name], mesh[outer_name], float(mesh.size()))

    def precision_of(_name: str, parameter: nn.Parameter) -> GroupPrecision:
        compute = policy.param_dtype or parameter.dtype
        return GroupPrecision(parameter.dtype, compute, parameter.dtype, policy.reduce_dtype or compute)

    return GroupingOptions(
        strategy=ShardingStrategy.parse(strategy),
        outer_strategy=OuterStrategy.parse(outer),
        precision_of=precision_of,
        placement_for=lambda _name, _parameter: placement,
        locate=None,
        tensor_atomic=False,
        device=device_of(mesh),
    )


def _ensure_engine(unit: Unit) -> Engine:
    """Return the unit's engine; when the first unit is used, the outermost one that holds it becomes the root."""
    if unit.engine is None:
        while unit.parent is not None:
            unit = unit.parent
        root = unit.modules[0]
        _name_parameters(root)
        units = units_below(unit.modules)
        if any(other.engine is not None for other in units):
            raise RuntimeError(
                "FSDP: a unit inside this module was used before this module was wrapped; wrap the outermost module "
                "before using any unit in it"
            )
        check_initialised(root, units)
        unit.engine = make_engine(root, units, prefetch=1, max_reductions=2)
        root.__dict__[HOOKS_ATTRIBUTE].is_root = True
        if unit.reshard_setting is None:
            unit.reshard_after_forward = False
    return unit.engine


def _name_parameters(root: nn.Module) -> None:
    """Give units and parameters their names in the root, for messages and state dicts."""
    for name, module in root.named_modules():
        unit = unit_of(module)
        if unit is not None and unit.modules[0] is module:
            unit.name = name or type(module).__name__
    for name, parameter in root.named_parameters():
        managed = getattr(parameter, "_fsdp_managed", None)
        if managed is not None:
            managed.rename(name)
            if managed.index == 0:
                managed.group.name = name
