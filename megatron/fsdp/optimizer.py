"""Any torch optimizer over the sharded parameters.

An optimizer made after wrapping needs nothing: `.grad` of a sharded parameter is its reduced gradient. One made before
is re-pointed by `bind_optimizer`. Two global optimizer hooks, installed when the first model is wrapped, see every
`torch.optim.Optimizer.step`: before it, an optimizer that still holds parameters from before wrapping is an error;
after it, the groups of the parameters that it stepped are stale (param_group.py, Note [Gather is due]).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from megatron.fsdp.managed import ManagedParameter
from megatron.fsdp.sharded_parameter import ShardedTensor

_WATCHED = "_fsdp_watched"


def managed_of(parameter: Any) -> ManagedParameter | None:
    """Return FSDP's record of a sharded parameter, or of the original one that it replaced; None for others."""
    return getattr(parameter, "_fsdp_managed", None)


def bind_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Re-point an optimizer that was made before `model` was wrapped to the sharded parameters.

    Groups and their options stay. State that the optimizer has already is an error: it belongs to whole tensors.

    Raises:
        ValueError: the optimizer has state, or a parameter of it is not one of `model`'s.
    """
    if optimizer.state:
        raise ValueError(
            "bind_optimizer: the optimizer has taken a step already; bind it before the first step"
        )
    names = {id(parameter) for parameter in model.parameters()}
    for group in optimizer.param_groups:
        bound = []
        for parameter in group["params"]:
            managed = managed_of(parameter)
            sharded = parameter if managed is None else managed.sharded
            if id(sharded) not in names:
                raise ValueError(
                    f"bind_optimizer: a parameter of shape {tuple(parameter.shape)} is not one of the model's: make "
                    f"the optimizer over the parameters of the module that was wrapped"
                )
            bound.append(sharded)
        group["params"] = bound


def _before_step(optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
    if not optimizer.__dict__.get(_WATCHED):
        optimizer.__dict__[_WATCHED] = True
        optimizer.register_load_state_dict_post_hook(_adopt_state)
        _adopt_state(optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            managed = managed_of(parameter)
            if managed is not None and parameter is not managed.sharded:
                raise RuntimeError(
                    f"the optimizer holds parameter {managed.name} as it was before FSDP wrapped the model; make the "
                    f"optimizer after wrapping, or call megatron.fsdp.bind_optimizer(optimizer, model)"
                )


def _adopt_state(optimizer: torch.optim.Optimizer) -> None:
    """Give loaded state that torch cut in even chunks (`distribute_tensor`) the parameter's layout; collective."""
    for parameter, state in optimizer.state.items():
        managed = managed_of(parameter)
        if managed is None:
            continue
        for key, value in state.items():
            if isinstance(value, ShardedTensor):
                value.shard_info.check_is_of(managed.info)
            elif isinstance(value, DTensor) and tuple(value.shape) == managed.info.shape:
                state[key] = managed.group.sharded_copy(managed, value.full_tensor())


def _after_step(optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            managed = managed_of(parameter)
            if managed is not None:
                managed.group.mark_stale()


@functools.cache
def watch_optimizers() -> None:
    """Install the two global hooks, once in a process."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
