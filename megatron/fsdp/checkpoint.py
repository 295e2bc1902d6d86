"""Sharded state for torch.distributed.checkpoint: any layout to any layout.

Tensors are keyed by global name and carry their offsets in the global tensor (sharded_parameter.py), from the layout's
arithmetic: no rank asks another what it holds. Optimizer state is exported as the parameter's layout says, whatever the
optimizer: a state tensor of the parameter's shape is sharded as it, any other is replicated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron.fsdp.optimizer import managed_of
from megatron.fsdp.param_group import ManagedParameter
from megatron.fsdp.sharded_parameter import attach

StateShapes = Mapping[str, tuple[torch.Size, torch.dtype]]


def managed_parameters(model: nn.Module) -> dict[str, ManagedParameter]:
    """Return FSDP's record of every parameter of `model` by global name; a tied weight comes once.

    Raises:
        ValueError: two parameters with one global name, or a parameter that FSDP does not manage.
    """
    found: dict[str, ManagedParameter] = {}
    for name, parameter in model.named_parameters():
        managed = managed_of(parameter)
        if managed is None:
            raise ValueError(f"{name} is not managed by FSDP; wrap the whole model before saving it")
        key = managed.info.location.name
        if found.setdefault(key, managed) is not managed:
            raise ValueError(f"two parameters have the global name {key}: `locate` must tell them apart")
    return found


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Return {global name: sharded main parameter}; loading into these tensors loads the model.

    Call `mark_loaded` after a load.
    """
    return {
        name: attach(managed.sharded.detach(), managed.info)
        for name, managed in managed_parameters(model).items()
    }


def mark_loaded(model: nn.Module) -> None:
    """Say that main parameters were written in place: the next forward gathers them anew."""
    for managed in managed_parameters(model).values():
        managed.group.mark_stale()


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Return {global name: {key: value}} of an optimizer over sharded parameters.

    Tensors of the parameter's shape are sharded with its layout, others are what they are.
    """
    state: dict[str, dict[str, Any]] = {}
    for managed in _managed_of(optimizer):
        values = optimizer.state.get(managed.sharded, {})
        state[managed.info.location.name] = {key: _export(value, managed) for key, value in values.items()}
    return state


def allocate_optimizer_state(optimizer: torch.optim.Optimizer, shapes: StateShapes, prefix: str = "") -> None:
    """Give the optimizer zero state with the keys that a checkpoint has, without taking a step.

    Args:
        optimizer: over sharded parameters; its present state is dropped.
        shapes: {prefix + global name + "." + key: (size, dtype)} of the checkpoint's tensors.
        prefix: of the keys of optimizer state.
    """
    by_name: dict[str, dict[str, tuple[torch.Size, torch.dtype]]] = {}
    for path, described in shapes.items():
        if path.startswith(prefix):
            name, _, key = path[len(prefix) :].rpartition(".")
            by_name.setdefault(name, {})[key] = described
    optimizer.state.clear()
    for managed in _managed_of(optimizer):
        for key, (size, dtype) in by_name.get(managed.info.location.name, {}).items():
            parameter = managed.sharded
            if tuple(size) == managed.info.location.global_shape and (size or managed.info.shape == ()):
                value: Tensor = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            else:
                value = torch.zeros(size, dtype=dtype)
            optimizer.state[parameter][key] = value


def _managed_of(optimizer: torch.optim.Optimizer) -> list[ManagedParameter]:
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            managed = managed_of(parameter)
            if managed is None or managed.sharded is not parameter:
                raise ValueError(
                    "the optimizer holds a parameter that FSDP does not manage; make it over the wrapped model's "
                    "parameters, or call megatron.fsdp.bind_optimizer(optimizer, model)"
                )
            found.append(managed)
    return found


def _export(value: Any, managed: ManagedParameter) -> Any:
    if isinstance(value, DTensor) and tuple(value.shape) == managed.info.shape:
        return attach(value, managed.info)
    return value
