"""The optimizer over the sharded parameters: which parameters share options, and which implementation steps
them.

The only file that imports apex.

Note "Weight decay": as in Megatron, biases and tensors with one dim (norm weights) are not decayed;
``--apply-wd-to-qk-layernorm`` decays the q/k norms. The shape that counts is the whole parameter's: a shard
of one row is no vector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.train.grad_norm import local_tensor

FusedAdam = type[torch.optim.Optimizer]


@dataclass(frozen=True)
class GroupOptions:
    """Options of a parameter group beyond the optimizer's own; the scheduler reads them (lr_schedule.py)."""

    wd_mult: float = 1.0
    lr_mult: float = 1.0
    max_lr: float | None = None
    min_lr: float | None = None

    def as_group(self, parameters: list[Tensor]) -> dict[str, Any]:
        """A torch param group."""
        options = {name: value for name, value in vars(self).items() if value is not None}
        return {"params": parameters, **options}


@dataclass(frozen=True)
class OptimizerConfig:
    """What to build: `kind` "adam" or "sgd"; `implementation` as --optimizer-impl has it."""

    kind: str = "adam"
    implementation: str = "auto"
    lr: float = 1e-3
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.9
    decoupled_lr: float | None = None
    decoupled_min_lr: float | None = None
    decay_qk_norms: bool = False


def group_options(name: str, parameter: Tensor, config: OptimizerConfig) -> GroupOptions:
    """Options of the parameter called `name` (global shape, as in ``named_parameters()``)."""
    vector = name.endswith(".bias") or parameter.dim() <= 1
    qk_norm = config.decay_qk_norms and ("q_layernorm" in name or "k_layernorm" in name)
    decoupled = config.decoupled_lr is not None and (
        "embedding.word_embeddings." in name or "output_layer." in name
    )
    return GroupOptions(
        wd_mult=0.0 if vector and not qk_norm else 1.0,
        max_lr=config.decoupled_lr if decoupled else None,
        min_lr=config.decoupled_min_lr if decoupled else None,
    )


def parameter_groups(
    named_parameters: Iterable[tuple[str, Tensor]], config: OptimizerConfig
) -> list[dict[str, Any]]:
    """Trainable parameters as torch param groups, those with equal options together, in order of
    appearance.
    """
    groups: dict[GroupOptions, list[Tensor]] = {}
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            groups.setdefault(group_options(name, parameter, config), []).append(parameter)
    return [options.as_group(parameters) for options, parameters in groups.items()]


def build_optimizer(
    named_parameters: Iterable[tuple[str, Tensor]],
    config: OptimizerConfig,
    backend_adam: Callable[[], FusedAdam | None] = lambda: None,
) -> torch.optim.Optimizer:
    """Make the optimizer of a run.

    Args:
        named_parameters: the sharded parameters.
        config: what to build.
        backend_adam: ``backend.fused_adam``: the backend's own Adam, or None.

    Raises:
        ValueError: an implementation that is not there, or does not know the optimizer.
    """
    groups = parameter_groups(named_parameters, config)
    if not groups:
        raise ValueError("the model has no trainable parameter; unfreeze one")
    on_cuda = any(parameter.is_cuda for group in groups for parameter in group["params"])
    implementations = _ADAM if config.kind == "adam" else _SGD if config.kind == "sgd" else None
    if implementations is None:
        raise ValueError(f"--optimizer {config.kind} is not built; use adam or sgd")
    name = config.implementation
    if name == "auto":
        name = "te" if on_cuda and config.kind == "adam" and backend_adam() is not None else "fused"
    if name not in implementations:
        raise ValueError(
            f"--optimizer-impl {name} is no implementation of --optimizer {config.kind}; use auto or one of "
            f"{', '.join(implementations)}"
        )
    return implementations[name](groups, config, backend_adam)


def _torch_adam(**options: bool) -> Callable[..., torch.optim.Optimizer]:
    def build(groups: list[dict[str, Any]], config: OptimizerConfig, _: object) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            groups,
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            **options,
        )

    return build


class FusedSGD(torch.optim.SGD):
    """torch's fused SGD kernel on this rank's shards; DTensor has no rule for that operator (torch 2.13).

    Momentum starts at zero, which gives the same numbers as torch's first step with dampening 0.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; see torch.optim.SGD."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            parameters, gradients, buffers = [], [], []
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if group["momentum"] and "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)
                if local_tensor(parameter).numel() == 0:
                    continue  # a rank may hold no row of it
                parameters.append(local_tensor(parameter))
                gradients.append(local_tensor(parameter.grad))
                if group["momentum"]:
                    buffers.append(local_tensor(state["momentum_buffer"]))
            if parameters:
                torch._fused_sgd_(
                    parameters,
                    gradients,
                    buffers,
                    weight_decay=group["weight_decay"],
                    momentum=group["momentum"],
                    lr=group["lr"],
                    dampening=0.0,
                    nesterov=False,
                    maximize=False,
                    is_first_step=False,
                )
        return loss


def _fused_sgd(groups: list[dict[str, Any]], config: OptimizerConfig, _: object) -> torch.optim.Optimizer:
    return FusedSGD(groups, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)


def _torch_sgd(**options: bool) -> Callable[..., torch.optim.Optimizer]:
    def build(groups: list[dict[str, Any]], config: OptimizerConfig, _: object) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            groups, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay, **options
        )

    return build


def _backend_adam(
    groups: list[dict[str, Any]], config: OptimizerConfig, backend_adam: Callable[[], FusedAdam | None]
) -> torch.optim.Optimizer:
    adam = backend_adam()
    if adam is None:
        raise ValueError(
            "--optimizer-impl te: this backend has no Adam of its own; use --transformer-impl "
            "transformer_engine on a GPU, or --optimizer-impl fused"
        )
    return _external_adam(adam, groups, config)


def _apex_adam(groups: list[dict[str, Any]], config: OptimizerConfig, _: object) -> torch.optim.Optimizer:
    try:
        from apex.optimizers import FusedAdam as ApexAdam
    except ImportError as error:
        raise ValueError("--optimizer-impl apex: apex is not installed; install it or use fused") from error
    return _external_adam(ApexAdam, groups, config)


def _external_adam(
    adam: FusedAdam, groups: list[dict[str, Any]], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """Transformer Engine's and apex's Adam have the same constructor; adam_w_mode decouples weight decay."""
    options: dict[str, Any] = {
        "lr": config.lr,
        "betas": config.betas,
        "eps": config.eps,
        "weight_decay": config.weight_decay,
        "adam_w_mode": True,
    }
    return adam(groups, **options)


_ADAM = {
    "fused": _torch_adam(fused=True),
    "foreach": _torch_adam(foreach=True),
    "loop": _torch_adam(foreach=False, fused=False),
    "te": _backend_adam,
    "apex": _apex_adam,
}
_SGD = {
    "fused": _fused_sgd,
    "foreach": _torch_sgd(foreach=True),
    "loop": _torch_sgd(foreach=False, fused=False),
}


def optimizer_config(config: Any) -> OptimizerConfig:
    """From a validated training config (Megatron's names)."""
    return OptimizerConfig(
        kind=config.optimizer,
        implementation=config.optimizer_impl,
        lr=config.lr,
        weight_decay=config.weight_decay,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        momentum=config.sgd_momentum,
        decoupled_lr=config.decoupled_lr,
        decoupled_min_lr=config.decoupled_min_lr,
        decay_qk_norms=config.apply_wd_to_qk_layernorm,
    )
