"""From wrapped modules to one engine: what both front ends (api.py, wrapper.py) share."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from megatron.fsdp.collectives import Communicator, all_equal
from megatron.fsdp.grouping import GroupBuilder
from megatron.fsdp.managed import ManagedParameter, ParameterSource
from megatron.fsdp.optimizer import managed_of, watch_optimizers
from megatron.fsdp.param_group import ParamGroup
from megatron.fsdp.schedule import Engine
from megatron.fsdp.sharded_parameter import ShardedTensor
from megatron.fsdp.unit import Unit

UNIT_ATTRIBUTE = "_fsdp_unit"
LOADS_ATTRIBUTE = "_fsdp_watches_loads"


def unit_of(module: nn.Module) -> Unit | None:
    """Return the unit that `module` is wrapped as, None if it is not."""
    return module.__dict__.get(UNIT_ATTRIBUTE)


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return this rank's device on `mesh`."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def own_modules(root: nn.Module, name: str, stop: Iterable[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of `root` and what is below it, without the subtrees of the modules in `stop`."""
    stops = {id(module) for module in stop}
    found, seen = [], set()

    def visit(prefix: str, module: nn.Module) -> None:
        if id(module) in seen or (id(module) in stops and module is not root):
            return
        seen.add(id(module))
        found.append((prefix, module))
        for child_name, child in module.named_children():
            visit(f"{prefix}.{child_name}" if prefix else child_name, child)

    visit(name, root)
    return found


class SourceCollector:
    """Collects the parameters of units, noticing those that are used by several."""

    def __init__(self, ignored: set[nn.Parameter] | None = None) -> None:
        self._ignored = {id(parameter) for parameter in ignored or ()}

    def collect(
        self, modules: Sequence[tuple[str, nn.Module]]
    ) -> tuple[list[ParameterSource], list[ManagedParameter]]:
        """Return what these modules own, and parameters that other units manage already (tied weights)."""
        sources: dict[int, ParameterSource] = {}
        borrowed: dict[int, ManagedParameter] = {}
        for prefix, module in modules:
            for attribute, parameter in module._parameters.items():
                if parameter is None or id(parameter) in self._ignored:
                    continue
                managed = managed_of(parameter)
                if managed is not None:
                    if (module, attribute) not in managed.sites:
                        managed.sites.append((module, attribute))
                        managed.install(managed.sharded)
                        watch_loads(module)
                        borrowed[id(managed)] = managed
                    continue
                name = f"{prefix}.{attribute}" if prefix else attribute
                source = sources.setdefault(id(parameter), ParameterSource(name, parameter))
                source.sites.append((module, attribute))
        return list(sources.values()), list(borrowed.values())


def make_unit(
    name: str, modules: tuple[nn.Module, ...], sources: list[ParameterSource], builder: GroupBuilder
) -> Unit:
    """Build the unit of `modules` from its parameters and mark the modules."""
    watch_optimizers()
    unit = Unit(name, modules, builder.build(sources))
    for module in modules:
        module.__dict__[UNIT_ATTRIBUTE] = unit
    for managed in unit.parameters:
        for module, _ in managed.sites:
            watch_loads(module)
    return unit


def move_buffers(module: nn.Module, device: torch.device, meta_allowed: bool = False) -> None:
    """Move buffers that are not on `device`; ValueError for buffers on meta unless somebody will fill them later."""
    for name, child in module.named_modules():
        for key, buffer in child._buffers.items():
            if buffer is not None and buffer.is_meta:
                if meta_allowed:
                    continue
                raise ValueError(
                    f"buffer {name}.{key} is on the meta device and FSDP cannot fill it; compute it lazily in forward, "
                    f"or build the module's buffers on a real device"
                )
            if buffer is not None and buffer.device != device:
                child._buffers[key] = buffer.to(device)


def watch_loads(module: nn.Module) -> None:
    """Let `load_state_dict` give `module`'s managed parameters their rows, whatever it is given."""
    if not module.__dict__.get(LOADS_ATTRIBUTE):
        module.__dict__[LOADS_ATTRIBUTE] = True
        module.register_load_state_dict_pre_hook(_before_load)


def _before_load(
    module: nn.Module,
    state: MutableMapping[str, Any],
    prefix: str,
    metadata: MutableMapping[str, Any],
    *_: object,
) -> None:
    """Replace whole tensors by this rank's rows (DTensors that are cut otherwise are gathered by `copy_`).

    With `assign`, values are copied all the same: optimizers and FSDP hold the parameters. Buffers on meta get memory.
    """
    owned = {
        name: managed for name, one in module._parameters.items() if (managed := managed_of(one)) is not None
    }
    for name, managed in owned.items():
        value = state.get(prefix + name)
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != managed.info.shape:
            continue  # an error that load_state_dict() reports
        if isinstance(value, ShardedTensor):
            value.shard_info.check_is_of(managed.info)
        elif not isinstance(value, DTensor):
            state[prefix + name] = managed.group.sharded_copy(managed, value)
    if owned and metadata.pop("assign_to_params_buffers", False):
        device = next(iter(owned.values())).group.spec.device
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)


def check_ties(root: nn.Module, units: Sequence[Unit]) -> None:
    """Refuse weights that were tied after wrapping: their second use would see a shard.

    Raises:
        ValueError: names both sites.
    """
    known = {
        (id(module), attribute): managed
        for unit in units
        for managed in unit.parameters
        for module, attribute in managed.sites
    }
    for name, module in root.named_modules():
        for attribute, parameter in module._parameters.items():
            managed = managed_of(parameter)
            if managed is not None and known.get((id(module), attribute)) is not managed:
                raise ValueError(
                    f"{name}.{attribute} was tied to {managed.name} after FSDP wrapped the model; tie weights before "
                    f"wrapping"
                )


def check_same_on_all_ranks(units: Sequence[Unit]) -> None:
    """Compare a hash of units and parameters over each group of ranks; one collective of 16 bytes a group.

    Raises:
        RuntimeError: on every rank of a group whose ranks differ.
    """
    by_comm: dict[Communicator, list[ParamGroup]] = {}
    for unit in units:
        for group in unit.groups:
            for comm in (group.comms.gather, group.comms.outer_gather):
                if comm.size > 1:
                    by_comm.setdefault(comm, []).append(group)
    for comm, groups in by_comm.items():
        text = "\n".join(
            f"{managed.name} {managed.info.shape} {group.precision} {group.layout.shard_numel} {managed.requires_grad}"
            for group in groups
            for managed in group.parameters
        )
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        if not all_equal(digest, comm, groups[0].spec.device):
            raise RuntimeError(
                f"FSDP: the ranks of one data-parallel group wrapped different modules or in another order (here "
                f"{sum(len(g.parameters) for g in groups)} parameters, the first {groups[0].parameters[0].name}). "
                f"Build and wrap the model in the same way on every rank"
            )


def make_engine(root: nn.Module, units: Sequence[Unit], prefetch: int, max_reductions: int) -> Engine:
    """Check and return the engine over `units` (in registration order) of the model `root`."""
    check_ties(root, units)
    check_same_on_all_ranks(units)
    owner = next((unit for unit in units if unit.groups), None)
    if owner is None:
        raise ValueError("FSDP: the module has no parameters to manage")
    return Engine(units, owner.groups[0].spec.device, prefetch, max_reductions)
