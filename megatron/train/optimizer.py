"""The optimizer over the sharded parameters: which parameters share options, and which implementation steps
them.

The only file that imports apex.

Note "Weight decay": as in Megatron, biases and tensors with one dim (norm weights) are not decayed;
``--apply-wd-to-qk-layernorm`` decays the q/k norms. The shape that counts is the whole parameter's: a shard
of one row is no vector.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron.models.variants import MuPConfig
from megatron.parallel.mesh import ParallelMesh
from megatron.train.adam_states import Lion, PrecisionAwareAdam, StateDtypes
from megatron.train.external_adam import ExternalAdam
from megatron.train.grad_norm import local_tensor
from megatron.train.muon import Muon, MuonConfig, is_matrix

MUON_KINDS = ("muon", "dist_muon")
_STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
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
    """What to build: `kind` as --optimizer has it; `implementation` as --optimizer-impl has it, of adam and sgd.

    states: dtypes of Adam's averages. hidden_lr_mult: of hidden matrices under Adam (muP).
    """

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
    states: StateDtypes = field(default_factory=StateDtypes)
    muon: MuonConfig = field(default_factory=MuonConfig)
    hidden_lr_mult: float = 1.0


def group_options(name: str, parameter: Tensor, config: OptimizerConfig) -> GroupOptions:
    """Options of the parameter called `name` (global shape, as in ``named_parameters()``)."""
    vector = name.endswith(".bias") or parameter.dim() <= 1
    qk_norm = config.decay_qk_norms and ("q_layernorm" in name or "k_layernorm" in name)
    decoupled = config.decoupled_lr is not None and (
        "embedding.word_embeddings." in name or "output_layer." in name
    )
    return GroupOptions(
        wd_mult=0.0 if vector and not qk_norm else 1.0,
        lr_mult=config.hidden_lr_mult if config.kind == "adam" and is_matrix(name, parameter) else 1.0,
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
    mesh: ParallelMesh | None = None,
) -> torch.optim.Optimizer:
    """Make the optimizer of a run.

    Args:
        named_parameters: the sharded parameters.
        config: what to build.
        backend_adam: ``backend.fused_adam``: the backend's own Adam, or None.
        mesh: whose tensor axes cut matrices, for Muon.

    Raises:
        ValueError: an implementation that is not there, or does not know the optimizer.
    """
    named = list(named_parameters)
    groups = parameter_groups(named, config)
    if not groups:
        raise ValueError("the model has no trainable parameter; unfreeze one")
    ours = _own_optimizer(groups, named, config, mesh)
    if ours is not None:
        if config.implementation != "auto":
            raise ValueError(
                f"--optimizer-impl {config.implementation}: --optimizer {config.kind} with its states has one "
                "implementation; use auto"
            )
        return ours
    on_cuda = any(parameter.is_cuda for group in groups for parameter in group["params"])
    implementations = _ADAM if config.kind == "adam" else _SGD if config.kind == "sgd" else None
    if implementations is None:
        raise ValueError(f"--optimizer {config.kind} is not built; use adam, sgd, lion or muon")
    name = config.implementation
    if name == "auto":
        name = "fused"
        if on_cuda and config.kind == "adam":
            name = fastest_adam(backend_adam(), apex_adam())
    if name not in implementations:
        raise ValueError(
            f"--optimizer-impl {name} is no implementation of --optimizer {config.kind}; use auto or one of "
            f"{', '.join(implementations)}"
        )
    return implementations[name](groups, config, backend_adam)


def _own_optimizer(
    groups: list[dict[str, Any]],
    named: list[tuple[str, Tensor]],
    config: OptimizerConfig,
    mesh: ParallelMesh | None,
) -> torch.optim.Optimizer | None:
    """The optimizers that torch does not have; None where it has what the config asks for."""
    options: dict[str, Any] = {
        "lr": config.lr,
        "betas": config.betas,
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
    if config.kind == "lion":
        return Lion(groups, config.muon.lion_betas, **options)
    if config.kind in MUON_KINDS:
        return Muon(groups, named, config.muon, mesh, **options)
    if config.kind == "adam" and config.states != StateDtypes():
        return PrecisionAwareAdam(groups, config.states, **options)
    return None


def write_group_map(
    path: str, named_parameters: Iterable[tuple[str, Tensor]], config: OptimizerConfig
) -> None:
    """Write which options each parameter has, as a JSON object by name (--dump-param-to-param-group-map)."""
    table = {name: vars(group_options(name, p, config)) for name, p in named_parameters if p.requires_grad}
    with open(path, "w", encoding="utf-8") as file:
        json.dump(table, file, indent=1)


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


def fastest_adam(backend: FusedAdam | None, apex: FusedAdam | None) -> str:
    """What --optimizer-impl auto takes for Adam on CUDA: the backend's own, apex's, torch's."""
    return "te" if backend is not None else "apex" if apex is not None else "fused"


def apex_adam() -> FusedAdam | None:
    """apex's FusedAdam, None where apex is not installed."""
    try:
        from apex.optimizers import FusedAdam as ApexAdam
    except ImportError:
        return None
    return ApexAdam


def _backend_adam(
    groups: list[dict[str, Any]], config: OptimizerConfig, backend_adam: Callable[[], FusedAdam | None]
) -> torch.optim.Optimizer:
    adam = backend_adam()
    if adam is None:
        raise ValueError(
            "--optimizer-impl te: this backend has no Adam of its own; use --transformer-impl "
            "transformer_engine on a GPU, or --optimizer-impl fused"
        )
    return ExternalAdam(adam, groups, _adam_options(config))


def _apex_adam(groups: list[dict[str, Any]], config: OptimizerConfig, _: object) -> torch.optim.Optimizer:
    adam = apex_adam()
    if adam is None:
        raise ValueError("--optimizer-impl apex: apex is not installed; install it or use fused")
    return ExternalAdam(adam, groups, _adam_options(config))


def _adam_options(config: OptimizerConfig) -> dict[str, Any]:
    return {
        "lr": config.lr,
        "betas": config.betas,
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }


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
    states = StateDtypes()
    if config.use_precision_aware_optimizer:
        states = StateDtypes(_STATE_DTYPES[config.exp_avg_dtype], _STATE_DTYPES[config.exp_avg_sq_dtype])
    mup = MuPConfig.from_arguments(config)
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
        decay_qk_norms=config.apply_wd_to_qk_layernorm or config.no_weight_decay_cond_type is not None,
        states=states,
        muon=_muon_config(config),
        hidden_lr_mult=1.0 if mup is None else 1.0 / mup.width_mult,
    )


def _muon_config(config: Any) -> MuonConfig:
    rows = None
    if config.muon_split_qkv and not (config.multi_latent_attention or config.attention_output_gate):
        heads = config.num_attention_heads // config.num_query_groups
        rows = (heads * config.kv_channels, config.kv_channels)
    return MuonConfig(
        momentum=config.muon_momentum,
        nesterov=config.muon_nesterov,
        num_ns_steps=config.muon_num_ns_steps,
        coefficient_type=config.muon_coefficient_type,
        scale_mode=config.muon_scale_mode,
        extra_scale_factor=config.muon_extra_scale_factor,
        tp_mode=config.muon_tp_mode,
        scalar_optimizer=config.muon_scalar_optimizer,
        fp32_matmul_prec=config.muon_fp32_matmul_prec,
        head_rows=rows,
        lion_betas=(config.lion_beta1, config.lion_beta2),
    )
