"""Models that were built on the meta device: their first values, and the check that they have any.

`FullyShardedDataParallel` draws them shard by shard with its `initialize` callback. Under `fully_shard` a script does
as with FSDP2: `model.to_empty(device=...)`, then in-place initialisation through `model.parameters()`, each rank its
own rows; or `reset_parameters_by_unit`, whose result does not depend on the layout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

import torch
from torch import nn

from megatron.fsdp.managed import ManagedParameter
from megatron.fsdp.optimizer import managed_of
from megatron.fsdp.root import unit_of
from megatron.fsdp.unit import Unit


def _reset(module: nn.Module) -> None:
    module.reset_parameters()  # type: ignore[operator]


def reset_parameters_by_unit(
    model: nn.Module, seed: int, reset: Callable[[nn.Module], None] = _reset
) -> None:
    """Give the parameters of a wrapped model the values of their modules' `reset_parameters()`.

    Unit after unit, each with a seed of its own made of `seed` and its name: every rank draws the whole unit and keeps
    its rows. The values do not depend on strategy or number of ranks, and no rank holds more than one whole unit.
    The global random state is left as it was.

    Args:
        model: wrapped by `fully_shard`.
        seed: of the model, the same on all ranks.
        reset: gives one module's own parameters their values in place.

    Raises:
        ValueError: a module that has parameters but no `reset_parameters`, naming it; pass `reset` then.
    """
    for name, module in model.named_modules():
        unit = unit_of(module)
        if unit is not None and unit.modules[0] is module:
            digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
            device = unit.groups[0].spec.device if unit.groups else torch.device("cpu")
            with torch.random.fork_rng([device.index] if device.type == "cuda" else []), torch.no_grad():
                torch.manual_seed(int.from_bytes(digest[:7], "big"))
                _reset_unit(unit, name, reset)


def _reset_unit(unit: Unit, name: str, reset: Callable[[nn.Module], None]) -> None:
    owners = dict.fromkeys(managed.sites[0][0] for managed in unit.parameters)
    for owner in owners:
        whole: dict[ManagedParameter, nn.Parameter] = {}
        for parameter in owner.parameters(recurse=False):
            managed = managed_of(parameter)
            if managed is not None:
                empty = torch.empty(
                    managed.info.shape, dtype=managed.sharded.dtype, device=managed.group.spec.device
                )
                whole[managed] = nn.Parameter(empty, managed.requires_grad)
        for managed, parameter in whole.items():
            managed.install(parameter)
        try:
            reset(owner)
        except AttributeError as error:
            if hasattr(owner, "reset_parameters"):
                raise
            raise ValueError(
                f"reset_parameters_by_unit: {type(owner).__name__} in unit {name or 'of the root'} has parameters but "
                f"no reset_parameters(); pass reset= with a function that initialises one module"
            ) from error
        finally:
            for managed in whole:
                managed.install(managed.sharded)
        for managed, parameter in whole.items():
            if managed.group in unit.groups and managed.sites[0][0] is owner:
                managed.group.set_rows(managed, parameter)
    for group in unit.groups:
        group.mark_stale()


def check_initialised(root: nn.Module, units: Iterable[Unit]) -> None:
    """Refuse to run a model whose values nobody has set.

    Raises:
        RuntimeError: a parameter or buffer that was built on meta and never written, naming it.
    """
    for unit in units:
        for group in unit.groups:
            unwritten = [managed for managed in group.parameters if managed.writes == 0]
            if group.unset and unwritten:
                raise RuntimeError(
                    f"FSDP: {unwritten[0].name} was built on the meta device and has no value yet; call "
                    f"model.to_empty(device=...) and initialise the parameters, or "
                    f"reset_parameters_by_unit(model, seed)"
                )
    for name, buffer in root.named_buffers():
        if buffer.is_meta:
            raise RuntimeError(
                f"FSDP: buffer {name} is on the meta device; call model.to_empty(device=...) and fill it, or build the "
                f"module's buffers on a real device"
            )
