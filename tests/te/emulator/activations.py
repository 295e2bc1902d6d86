"""Activations, plain and gated, with their derivatives (fused with the bias gradient where TE has that)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.te.emulator.tensors import bgrad_quantize, quantize

Activation = Callable[[Tensor], Tensor]


def gradient_of(function: Activation, output_gradient: Tensor, value: Tensor) -> Tensor:
    """Gradient of `function` at `value`, in fp32, by autograd."""
    with torch.enable_grad():
        leaf = value.detach().float().requires_grad_(True)
        result = function(leaf)
        return torch.autograd.grad(result, leaf, output_gradient.detach().float().reshape(result.shape))[0]


def gelu(x: Tensor) -> Tensor:
    """TE's GELU is the tanh approximation."""
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    """x sigmoid(1.702 x)."""
    return x * torch.sigmoid(1.702 * x)


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2."""
    return F.relu(x).square()


def _gated(activation: Activation) -> Activation:
    def apply(x: Tensor) -> Tensor:
        gate, value = x.chunk(2, -1)
        return activation(gate) * value

    return apply


UNARY: dict[str, Activation] = {
    "gelu": gelu,
    "qgelu": quick_gelu,
    "relu": F.relu,
    "srelu": squared_relu,
    "silu": F.silu,
}
GATED: dict[str, Activation] = {
    "glu": _gated(torch.sigmoid),
    "geglu": _gated(gelu),
    "qgeglu": _gated(quick_gelu),
    "reglu": _gated(F.relu),
    "sreglu": _gated(squared_relu),
    "swiglu": _gated(F.silu),
}


def _forward(function: Activation) -> Callable[..., Any]:
    def forward(input: Tensor, quantizer: Any) -> Any:
        return quantize(function(input.detach().float()).to(input.dtype), quantizer)

    return forward


def _backward(function: Activation) -> Callable[..., Any]:
    def backward(grad: Tensor, input: Tensor, quantizer: Any) -> Any:
        return quantize(gradient_of(function, grad, input).to(grad.dtype).reshape(input.shape), quantizer)

    return backward


def _backward_with_bias(backward: Callable[..., Any]) -> Callable[..., list[Any]]:
    def backward_with_bias(grad: Tensor, input: Tensor, quantizer: Any) -> list[Any]:
        return bgrad_quantize(backward(grad, input, None), quantizer)

    return backward_with_bias


def functions() -> dict[str, Callable[..., Any]]:
    """name -> kernel: `gelu`, `dgelu`, `dbias_dgelu`, `swiglu`, `dswiglu`, ..."""
    kernels: dict[str, Callable[..., Any]] = {}
    for name, function in {**UNARY, **GATED}.items():
        kernels[name] = _forward(function)
        kernels[f"d{name}"] = _backward(function)
        if name in UNARY:
            kernels[f"dbias_d{name}"] = _backward_with_bias(kernels[f"d{name}"])
    return kernels
