"""The experts of a rank: grouped linear layers, and the shared expert that every token meets."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron.models.mlp import activation_function
from megatron.parallel.annotate import ParameterAnnotation, annotate, annotation_of
from megatron.parallel.expert.permute import padded_places
from megatron.parallel.recompute import DiscardedOutput

if TYPE_CHECKING:
    from megatron.models.block import LayerContext
    from megatron.models.init import InitSpec
    from megatron.parallel.mesh import ParallelMesh


class GroupedExperts(nn.Module):
    """linear_fc1, activation, linear_fc2 of several experts; parameters weight{i}, i of this rank's experts.

    Note "One bias of several ranks": the results of etp ranks are summed, so each adds 1 / etp of linear_fc2's bias.
    All of them see the same rows and the same gradients, so each has the bias's whole gradient.
    """

    def __init__(self, context: LayerContext, num_local: int, ffn_hidden_size: int) -> None:
        super().__init__()
        config, backend = context.config, context.backend
        parts = 2 if config.gated_linear_unit else 1
        expert_tensor = context.mesh.size("etp")
        shares_bias = config.add_bias_linear and expert_tensor > 1
        sizes = ((config.hidden_size, parts * ffn_hidden_size), (ffn_hidden_size, config.hidden_size))
        inits = (
            config.linear_init(config.hidden_size, ffn_hidden_size),
            config.linear_init(ffn_hidden_size, config.hidden_size, writes_residual=True),
        )
        layers = [
            backend.GroupedLinear(
                num_local,
                *size,
                bias=config.add_bias_linear,
                return_bias=shares_bias and mode == "row",
                parallel_mode=mode,
                init_std=init.std,
                tensor_parallel_parts=part,
                name=f"layer{context.layer_number}.experts.{name}",
            )
            for size, init, mode, part, name in zip(
                sizes, inits, ("column", "row"), (parts, 1), ("fc1", "fc2"), strict=True
            )
        ]
        for layer, init in zip(layers, inits, strict=True):
            _set_weight_inits(layer, init)
        self.linear_fc1, self.linear_fc2 = layers
        self._bias_share = 1.0 / expert_tensor if shares_bias else None
        self._activation = activation_function(config)
        self._discards_activation = config.recompute.selects("moe_act")
        self._row_multiple = backend.row_multiple(context.recipe)

    def forward(self, rows: Tensor, splits: list[int]) -> Tensor:
        """rows: [n, hidden] sorted by expert, `splits` of each -> [n, hidden]; over etp a partial sum."""
        if self._row_multiple == 1:
            return self._experts(rows, splits)
        padded_splits, places = padded_places(splits, self._row_multiple)
        places = places.to(rows.device, non_blocking=True)
        padded = rows.new_zeros(sum(padded_splits), rows.shape[1]).index_copy(0, places, rows)
        return self._experts(padded, padded_splits).index_select(0, places)

    def _experts(self, rows: Tensor, splits: list[int]) -> Tensor:
        if not self._discards_activation:
            return self._second(self._activation(self.linear_fc1(rows, splits)), splits)
        activated = DiscardedOutput()
        out = self._second(activated.call(self._activation, self.linear_fc1(rows, splits)), splits)
        activated.discard(out)
        return out

    def _second(self, rows: Tensor, splits: list[int]) -> Tensor:
        if self._bias_share is None:
            out: Tensor = self.linear_fc2(rows, splits)
            return out
        out, biases = self.linear_fc2(rows, splits)
        shares = _Share.apply(torch.stack(list(biases)), self._bias_share)
        counts = torch.tensor(splits).to(rows.device, non_blocking=True)
        return out + shares.repeat_interleave(counts, dim=0, output_size=out.shape[0]).to(out.dtype)


class _Share(torch.autograd.Function):
    """Note "One bias of several ranks": forward takes the share, backward gives the whole gradient."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, share: float) -> Tensor:
        return bias * share

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


def _set_weight_inits(layer: nn.Module, spec: InitSpec) -> None:
    for name, parameter in layer.named_parameters():
        if name.startswith("weight"):
            parameter.init_spec = spec  # type: ignore[attr-defined]


class SharedExpert(nn.Module):
    """An MLP that every token meets; with a gate, times sigmoid(gate_weight . token) [1, hidden]."""

    gate_weight: nn.Parameter | None

    def __init__(self, context: LayerContext, ffn_hidden_size: int, gate: bool) -> None:
        super().__init__()
        config, backend = context.config, context.backend
        parts = 2 if config.gated_linear_unit else 1
        fc1_init = config.linear_init(config.hidden_size, ffn_hidden_size)
        fc2_init = config.linear_init(ffn_hidden_size, config.hidden_size, writes_residual=True)
        name = f"layer{context.layer_number}.shared_experts"
        self.linear_fc1 = backend.Linear(
            config.hidden_size,
            parts * ffn_hidden_size,
            bias=config.add_bias_linear,
            parallel_mode="column",
            init_std=fc1_init.std,
            tensor_parallel_parts=parts,
            name=f"{name}.fc1",
        )
        self.linear_fc2 = backend.Linear(
            ffn_hidden_size,
            config.hidden_size,
            bias=config.add_bias_linear,
            parallel_mode="row",
            init_std=fc2_init.std,
            name=f"{name}.fc2",
        )
        _set_weight_inits(self.linear_fc1, fc1_init)
        _set_weight_inits(self.linear_fc2, fc2_init)
        self._activation = activation_function(config)
        self.register_parameter("gate_weight", _gate(context) if gate else None)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [s, b, hidden] (s / tp under sequence parallelism) -> the same shape."""
        out: Tensor = self.linear_fc2(self._activation(self.linear_fc1(hidden)))
        if self.gate_weight is None:
            return out
        wide = torch.promote_types(hidden.dtype, torch.float32)
        gate = (hidden.to(wide) @ self.gate_weight.to(wide).t()).sigmoid()
        return (out * gate).to(out.dtype)


def _gate(context: LayerContext) -> nn.Parameter:
    options, size = context.backend.options, context.config.hidden_size
    weight = nn.Parameter(torch.empty(1, size, dtype=options.params_dtype, device=options.device))
    weight.init_spec = context.config.linear_init(size, 1)  # type: ignore[attr-defined]
    partial = "sum" if options.sequence_parallel else "none"
    return annotate(weight, ParameterAnnotation(replicated_gradient=partial))  # type: ignore[return-value, arg-type]


_EXPERT = re.compile(r"(\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)$")


def global_names(mesh: ParallelMesh, num_experts: int | None) -> Callable[[str, Any], str]:
    """Give a parameter's name in the whole model from its name on this rank: experts are numbered from the first of
    the layer, not of the rank.
    """
    first = 0 if num_experts is None else mesh.rank("ep") * (num_experts // mesh.size("ep"))

    def name_of(name: str, parameter: Any) -> str:
        if first == 0 or not annotation_of(parameter).expert:
            return name
        found = _EXPERT.search(name)
        assert found is not None, f"the expert parameter {name} has no number"
        return f"{name[: found.start()]}{found[1]}{int(found[2]) + first}"

    return name_of
