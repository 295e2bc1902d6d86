"""LayerNormMLP on plain torch: norm, fc1, activation, fc2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron.models.backends.base import LayerOptions
from megatron.models.backends.torch.delayed import DelayedWeightGradients
from megatron.models.backends.torch.linear import split_options
from megatron.models.backends.torch.norm import add_norm_parameters, normalize
from megatron.models.backends.torch.parameters import ZEROS, Cut, new_parameter
from megatron.models.init import InitSpec
from megatron.parallel.tensor import LinearPlan, linear, row_linear


def _tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


# Transformer Engine's names -> (function, gated). Gated: function(first half) * second half.
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "gelu": (_tanh_gelu, False),
    "geglu": (_tanh_gelu, True),
    "qgelu": (_quick_gelu, False),
    "qgeglu": (_quick_gelu, True),
    "relu": (F.relu, False),
    "reglu": (F.relu, True),
    "srelu": (_squared_relu, False),
    "sreglu": (_squared_relu, True),
    "silu": (F.silu, False),
    "swiglu": (F.silu, True),
}


class LayerNormMLP(DelayedWeightGradients):
    """Norm, fc1, activation, fc2. Arguments as Backend.LayerNormMLP, and LayerOptions or its fields.

    fc1 is cut by column and fc2 by row where `set_parallel_mode`. Both weights follow note "The contract" in
    megatron/parallel/wgrad.py.
    """

    layer_norm_weight: nn.Parameter
    layer_norm_bias: nn.Parameter | None
    fc1_weight: nn.Parameter
    fc1_bias: nn.Parameter | None
    fc2_weight: nn.Parameter
    fc2_bias: nn.Parameter | None

    uses_per_backward = 2

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        activation: str = "gelu",
        bias: bool = True,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        set_parallel_mode: bool = False,
        init_std: float = 0.02,
        output_init_std: float = 0.02,
        name: str = "",
        options: LayerOptions | None = None,
        **layer_options: Any,
    ) -> None:
        options, _ = split_options(options, layer_options)
        super().__init__(options.delay_wgrad_compute)
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation={activation!r}: choose one of {', '.join(ACTIVATIONS)}")
        self._function, self._gated = ACTIVATIONS[activation]
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.return_bias, self.return_layernorm_output = return_bias, return_layernorm_output
        add_norm_parameters(self, hidden_size, options, normalization, zero_centered_gamma)
        modes = ("column", "row") if set_parallel_mode else (None, None)
        parts = 2 if self._gated else 1
        cuts = [Cut(modes[0], False, parts, f"{name}.fc1"), Cut(modes[1], False, 1, f"{name}.fc2")]
        features = [(hidden_size, parts * ffn_hidden_size), (ffn_hidden_size, hidden_size)]
        for i, std in enumerate((init_std, output_init_std)):
            shape = cuts[i].local_shape(*features[i], options)
            weight = new_parameter(
                shape, options, InitSpec("normal", std), cuts[i].weight_annotation(options)
            )
            made = (
                new_parameter(shape[:1], options, ZEROS, cuts[i].bias_annotation(options)) if bias else None
            )
            self.register_parameter(f"fc{i + 1}_weight", weight)
            self.register_parameter(f"fc{i + 1}_bias", made)
        self.mark_delayed()
        self._make_plans(options, set_parallel_mode)

    def _make_plans(self, options: LayerOptions, parallel: bool) -> None:
        self._group = options.tp_group if parallel else None
        self._sequence_parallel = options.sequence_parallel
        store = self.wgrad_store if options.delay_wgrad_compute else None
        fused = options.fuse_wgrad_accumulation
        gather = self._group is not None and options.sequence_parallel
        self._plan1 = LinearPlan(self._group, gather, fused, store)
        self._plan2 = LinearPlan(fused=fused, store=store)

    def gemm_weights(self) -> list[Tensor]:
        """The weights whose gradients backward_dw() computes."""
        return [self.fc1_weight, self.fc2_weight]

    def forward(self, x: Tensor) -> Any:
        """[s, b, hidden] -> [s, b, hidden], or a tuple: see base.py, note "What a layer returns"."""
        normed = normalize(
            x, self.layer_norm_weight, self.layer_norm_bias, self.eps, self.zero_centered_gamma
        )
        inner = linear(normed, self.fc1_weight, self.fc1_bias, self._plan1)
        if self._gated:
            gate, up = inner.chunk(2, dim=-1)
            inner = self._function(gate) * up
        else:
            inner = self._function(inner)
        out = row_linear(inner, self.fc2_weight, self._plan2, self._group, self._sequence_parallel)
        if self.fc2_bias is not None and not self.return_bias:
            out = out + self.fc2_bias
        extra = (self.fc2_bias,) if self.return_bias else ()
        if self.return_layernorm_output:
            extra = (*extra, normed)
        return (out, *extra) if extra else out
