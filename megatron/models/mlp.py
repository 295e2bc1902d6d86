"""The dense feed-forward part of a layer: LayerNormLinear, activation, Linear."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.models.config import ModelConfig
from megatron.models.init import InitSpec

if TYPE_CHECKING:
    from megatron.models.block import LayerContext


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2 (https://arxiv.org/abs/2109.08668)."""
    return F.relu(x).square()


def quick_gelu(x: Tensor) -> Tensor:
    """x sigmoid(1.702 x), the sigmoid approximation of GELU (https://arxiv.org/abs/1606.08415)."""
    return x * torch.sigmoid(1.702 * x)


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by the hyperbolic tangent, as GPT-2 has it (https://arxiv.org/abs/1606.08415)."""
    return F.gelu(x, approximate="tanh")


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "silu": F.silu,
    "relu": F.relu,
    "squared_relu": squared_relu,
    "quick_gelu": quick_gelu,
}


def activation_function(config: ModelConfig) -> Callable[[Tensor], Tensor]:
    """The function between fc1 and fc2: [..., fc1 rows of this rank] -> [..., ffn channels of this rank].

    Gated (https://arxiv.org/abs/2002.05202): the input is [gate; up], the result act(gate) * (up + offset),
    both clamped first where the config has a clamp value.
    """
    function = _FUNCTIONS[config.activation]
    if not config.gated_linear_unit:
        return function
    clamp, offset = config.activation_func_clamp_value, config.glu_linear_offset

    def gated(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        if clamp is not None:
            gate, up = gate.clamp(max=clamp), up.clamp(min=-clamp, max=clamp)
        if offset:
            up = up + offset
        return function(gate) * up

    return gated


class MLP(nn.Module):
    """Norm, linear_fc1, activation, linear_fc2: [s, b, hidden] -> [s, b, hidden] (without the residual)."""

    recompute_name = "mlp"

    def __init__(self, context: LayerContext, ffn_hidden_size: int | None = None) -> None:
        super().__init__()
        config, backend = context.config, context.backend
        ffn = ffn_hidden_size or config.ffn_hidden_size
        parts = 2 if config.gated_linear_unit else 1
        fc1_init = config.linear_init(config.hidden_size, ffn)
        fc2_init = config.linear_init(ffn, config.hidden_size, writes_residual=True)
        self.linear_fc1 = context.linear_after_norm(
            config.hidden_size,
            parts * ffn,
            bias=config.add_bias_linear,
            parallel_mode="column",
            init_std=fc1_init.std,
            tensor_parallel_parts=parts,
            name=f"layer{context.layer_number}.fc1",
        )
        self.linear_fc2 = backend.Linear(
            ffn,
            config.hidden_size,
            bias=config.add_bias_linear,
            parallel_mode="row",
            init_std=fc2_init.std,
            name=f"layer{context.layer_number}.fc2",
        )
        set_weight_init(self.linear_fc1, fc1_init)
        set_weight_init(self.linear_fc2, fc2_init)
        self._activation = activation_function(config)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [s, b, hidden] (s / tp under sequence parallelism) -> the same shape."""
        return self.linear_fc2(self._activation(self.linear_fc1(hidden)))


def set_weight_init(module: nn.Module, spec: InitSpec) -> None:
    """Say how `module.weight` starts: backends know normal distributions only, configs others too."""
    module.weight.init_spec = spec  # type: ignore[union-attr]
