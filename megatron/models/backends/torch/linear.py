"""Linear and LayerNormLinear on plain torch, tensor and sequence parallel, with fused and delayed wgrad."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from megatron.models.backends.base import LayerOptions
from megatron.models.backends.torch.delayed import DelayedWeightGradients
from megatron.models.backends.torch.norm import add_norm_parameters, normalize
from megatron.models.backends.torch.parameters import ZEROS, Cut, new_parameter
from megatron.models.init import InitSpec
from megatron.parallel.tensor import LinearPlan, linear, row_linear


class Linear(DelayedWeightGradients):
    """y = x W^T + b. Arguments as Backend.Linear, and LayerOptions or its fields.

    With `fuse_wgrad_accumulation` the weight gradient goes into main_grad: see note "The contract" in
    megatron/parallel/wgrad.py.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        return_bias: bool = False,
        parallel_mode: str | None = None,
        init_std: float = 0.02,
        tensor_parallel_parts: int = 1,
        expert: bool = False,
        name: str = "",
        options: LayerOptions | None = None,
        **layer_options: Any,
    ) -> None:
        options = options or LayerOptions(**layer_options)
        super().__init__(options.delay_wgrad_compute)
        self.in_features, self.out_features, self.return_bias = in_features, out_features, return_bias
        cut = Cut(parallel_mode, expert, tensor_parallel_parts, name or "Linear")
        shape = cut.local_shape(in_features, out_features, options)
        self.weight = new_parameter(
            shape, options, InitSpec("normal", init_std), cut.weight_annotation(options)
        )
        made = new_parameter(shape[:1], options, ZEROS, cut.bias_annotation(options)) if bias else None
        self.register_parameter("bias", made)
        self.mark_delayed()
        self._group = None if expert or parallel_mode is None else options.tp_group
        self._row = parallel_mode == "row" and self._group is not None
        self._sequence_parallel = options.sequence_parallel
        self.plan = LinearPlan(
            group=None if self._row else self._group,
            gather_input=parallel_mode == "column" and self._group is not None and options.sequence_parallel,
            fused=options.fuse_wgrad_accumulation,
            store=self.wgrad_store if options.delay_wgrad_compute else None,
        )

    def gemm_weights(self) -> list[Tensor]:
        """The weights whose gradients backward_dw() computes."""
        return [self.weight]

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        """[s, b, in] -> [s, b, out], or a tuple: see base.py, note "What a layer returns"."""
        out = self._multiply(x)
        return (out, self.bias) if self.return_bias else out

    def _multiply(self, x: Tensor) -> Tensor:
        bias = None if self.return_bias else self.bias
        if not self._row:
            return linear(x, self.weight, bias, self.plan)
        out = row_linear(x, self.weight, self.plan, self._group, self._sequence_parallel)
        return out if bias is None else out + bias

    def extra_repr(self) -> str:
        """Shown by repr()."""
        return f"{self.in_features}, {self.out_features}, local {tuple(self.weight.shape)}"


class LayerNormLinear(Linear):
    """Norm, then Linear. Arguments as Backend.LayerNormLinear, and LayerOptions or its fields."""

    layer_norm_weight: nn.Parameter
    layer_norm_bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        options: LayerOptions | None = None,
        **linear_arguments: Any,
    ) -> None:
        options, linear_arguments = split_options(options, linear_arguments)
        if linear_arguments.get("parallel_mode") == "row":
            raise ValueError("LayerNormLinear: parallel_mode='row' would normalise a piece of the features")
        super().__init__(in_features, out_features, options=options, **linear_arguments)
        add_norm_parameters(self, in_features, options, normalization, zero_centered_gamma)
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.return_layernorm_output = return_layernorm_output

    def forward(self, x: Tensor) -> Any:
        """[s, b, in] -> [s, b, out], or a tuple: see base.py, note "What a layer returns"."""
        normed = normalize(
            x, self.layer_norm_weight, self.layer_norm_bias, self.eps, self.zero_centered_gamma
        )
        out = self._multiply(normed)
        extra = (self.bias,) if self.return_bias else ()
        if self.return_layernorm_output:
            extra = (*extra, normed)
        return (out, *extra) if extra else out


def split_options(
    options: LayerOptions | None, arguments: dict[str, Any]
) -> tuple[LayerOptions, dict[str, Any]]:
    """Part keyword arguments into LayerOptions (unless given) and the rest."""
    fields = LayerOptions.__dataclass_fields__
    given = {key: value for key, value in arguments.items() if key in fields}
    assert options is None or not given, f"both options and {sorted(given)}"
    return options or LayerOptions(**given), {k: v for k, v in arguments.items() if k not in fields}
