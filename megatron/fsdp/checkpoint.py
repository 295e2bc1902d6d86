"""Sharded state for torch.distributed.checkpoint: any layout to any layout.

Tensors are keyed by global name and carry their offsets in the global tensor (sharded_parameter.py), from the layout's
arithmetic: no rank asks another what it holds. Optimizer state is exported as the parameter's layout says, whatever the
optimizer: a state tensor of the parameter's shape is sharded as it, any other is replicated.

Note [Step counts]
torch's optimizers keep a `step` tensor for each parameter. Others (Transformer Engine's and apex's Adam) keep one
number in the parameter group, `group["step"]`, and state of this rank's part as plain tensors. A checkpoint always has
the first form, so that a run may go on with another implementation: on export the group's number is given for each of
its parameters, after a load it goes back into the group. What an optimizer of unknown make counts is the larger one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron.fsdp.managed import ManagedParameter
from megatron.fsdp.optimizer import managed_of
from megatron.fsdp.sharded_parameter import make_dtensor

STEP = "step"
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
    return {name: managed.sharded.detach() for name, managed in managed_parameters(model).items()}


def mark_loaded(model: nn.Module) -> None:
    """Say that main parameters were written in place: the next forward gathers them anew."""
    for managed in managed_parameters(model).values():
        managed.group.mark_stale()


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Return {global name: {key: value}} of an optimizer over sharded parameters.

    Tensors of the parameter's shape, or of this rank's part of it, are sharded with its layout, others are what they
    are. A step count that the optimizer keeps once in a group is given for each parameter (Note [Step counts]).
    """
    state: dict[str, dict[str, Any]] = {}
    for group, managed in _managed_of(optimizer):
        values = optimizer.state.get(managed.sharded, {})
        exported = {key: _export(value, managed) for key, value in values.items()}
        in_group = 0 if _counts_by_parameter(optimizer) else int(group.get(STEP, 0))
        if in_group > int(values.get(STEP, 0)):
            exported[STEP] = torch.tensor(float(in_group))
        state[managed.info.location.name] = exported
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
    for group, managed in _managed_of(optimizer):
        if STEP in group:
            group[STEP] = 0
        for key, (size, dtype) in by_name.get(managed.info.location.name, {}).items():
            optimizer.state[managed.sharded][key] = _zeros(
                managed, _Entry(key, size, dtype), group, local=not _counts_by_parameter(optimizer)
            )


def finish_optimizer_load(optimizer: torch.optim.Optimizer) -> None:
    """After loading into `optimizer_state`: put step counts where the optimizer looks for them (Note [Step counts])."""
    if _counts_by_parameter(optimizer):
        return
    for group, managed in _managed_of(optimizer):
        if STEP in optimizer.state.get(managed.sharded, {}):
            group[STEP] = int(optimizer.state[managed.sharded][STEP])


class _Entry(NamedTuple):
    """A tensor of optimizer state in a checkpoint."""

    key: str
    size: torch.Size
    dtype: torch.dtype


def _zeros(managed: ManagedParameter, entry: _Entry, group: Mapping[str, Any], *, local: bool) -> Tensor:
    parameter = managed.sharded
    if entry.key != STEP and tuple(entry.size) == managed.info.location.global_shape:
        like = parameter.to_local() if local and isinstance(parameter, DTensor) else parameter
        return torch.zeros_like(like, dtype=entry.dtype, requires_grad=False)
    # torch keeps a step count on the host unless the kernel reads it.
    on_device = entry.key != STEP or group.get("fused") or group.get("capturable")
    return torch.zeros(entry.size, dtype=entry.dtype, device=parameter.device if on_device else "cpu")


def _counts_by_parameter(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is one of torch's own, or derived from one (Note [Step counts])."""
    classes = type(optimizer).__mro__
    own = classes[: classes.index(torch.optim.Optimizer)]
    return any(one.__module__.startswith("torch.optim") for one in own)


def _managed_of(optimizer: torch.optim.Optimizer) -> list[tuple[dict[str, Any], ManagedParameter]]:
    """(its group, record) of every parameter."""
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            managed = managed_of(parameter)
            if managed is None or managed.sharded is not parameter:
                raise ValueError(
                    "the optimizer holds a parameter that FSDP does not manage; make it over the wrapped model's "
                    "parameters, or call megatron.fsdp.bind_optimizer(optimizer, model)"
                )
            found.append((group, managed))
    return found


def _export(value: Any, managed: ManagedParameter) -> Any:
    parameter = managed.sharded
    plain = isinstance(value, Tensor) and not isinstance(value, DTensor)
    if plain and value.dim() and tuple(value.shape) == managed.info.local_shape():
        return make_dtensor(value, managed.info, parameter.device_mesh, parameter.placements)
    return value
