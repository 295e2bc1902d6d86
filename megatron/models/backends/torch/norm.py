"""LayerNorm and RMSNorm on plain torch, and the norm that LayerNormLinear and LayerNormMLP begin with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron.models.backends.base import LayerOptions
from megatron.models.backends.torch.parameters import ONES, ZEROS, new_parameter
from megatron.parallel.annotate import ParameterAnnotation

NORMALIZATIONS = ("LayerNorm", "RMSNorm")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, computed in at least fp32 (arXiv:1910.07467)."""
    if x.is_cuda:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    """On CPU torch composes rms_norm of single operations; this takes half of their time in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        precise = torch.promote_types(x.dtype, torch.float32)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=precise)
        scale = torch.rsqrt(norm.square_().div_(x.shape[-1]).add_(eps))
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        product = grad * normed
        weight_grad = (
            product.reshape(-1, x.shape[-1]).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        )
        if not ctx.needs_input_grad[0]:
            return None, weight_grad, None
        mean = (product @ weight.to(product.dtype)).unsqueeze(-1).div_(-x.shape[-1])
        return normed.mul_(mean).add_(grad * weight).mul_(scale).to(x.dtype), weight_grad, None


class _Norm(nn.Module):
    """Common part: weight (and bias) over the last dim; replicated over tp."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        zero_centered_gamma: bool = False,
        tensor_partial: bool = False,
        options: LayerOptions | None = None,
        **layer_options: Any,
    ) -> None:
        super().__init__()
        options = options or LayerOptions(**layer_options)
        self.hidden_size, self.eps, self.zero_centered_gamma = hidden_size, eps, zero_centered_gamma
        annotation = norm_annotation(options, tensor_partial)
        gamma = ZEROS if zero_centered_gamma else ONES
        self.weight = new_parameter((hidden_size,), options, gamma, annotation)
        self.register_parameter("bias", self._make_bias(options, annotation))

    def _make_bias(self, options: LayerOptions, annotation: ParameterAnnotation) -> nn.Parameter | None:
        return None

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] -> the same shape and dtype."""
        return normalize(x, self.weight, self.bias, self.eps, self.zero_centered_gamma)

    def extra_repr(self) -> str:
        """Shown by repr()."""
        return f"{self.hidden_size}, eps={self.eps}"


class RMSNorm(_Norm):
    """Root mean square norm over the last dim; parameter weight. Arguments as Backend.RMSNorm."""


class LayerNorm(_Norm):
    """Layer norm over the last dim; parameters weight, bias. Arguments as Backend.LayerNorm."""

    def _make_bias(self, options: LayerOptions, annotation: ParameterAnnotation) -> nn.Parameter | None:
        return new_parameter((self.hidden_size,), options, ZEROS, annotation)


def norm_annotation(options: LayerOptions, tensor_partial: bool = False) -> ParameterAnnotation:
    """Replicated; gradients are partial where a tensor rank sees a piece of the sequence or its heads."""
    partial = options.tp_size > 1 and (options.sequence_parallel or tensor_partial)
    return ParameterAnnotation(replicated_gradient="sum" if partial else "none")


def normalize(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered_gamma: bool
) -> Tensor:
    """Layer norm where there is a bias, else RMS norm."""
    gamma = weight + 1 if zero_centered_gamma else weight
    if bias is None:
        return rms_norm(x, gamma, eps)
    return F.layer_norm(x, x.shape[-1:], gamma, bias, eps)


def add_norm_parameters(
    module: nn.Module, size: int, options: LayerOptions, normalization: str, zero_centered: bool
) -> None:
    """Give `module` layer_norm_weight and, for "LayerNorm", layer_norm_bias; ValueError for other names."""
    if normalization not in NORMALIZATIONS:
        raise ValueError(f"normalization={normalization!r}: choose one of {', '.join(NORMALIZATIONS)}")
    annotation = norm_annotation(options)
    module.layer_norm_weight = new_parameter((size,), options, ZEROS if zero_centered else ONES, annotation)
    bias = new_parameter((size,), options, ZEROS, annotation) if normalization == "LayerNorm" else None
    module.register_parameter("layer_norm_bias", bias)
