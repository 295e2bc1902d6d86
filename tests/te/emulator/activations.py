"""Activations, plain and gated, with their derivatives (fused with the bias gradient where TE has that)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.te.emulator.values import refuse_quantizer

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


def _forward(name: str, function: Activation) -> Callable[..., Tensor]:
    def forward(input: Tensor, quantizer: Any) -> Tensor:
        refuse_quantizer(quantizer, name)
        return function(input.detach().float()).to(input.dtype)

    return forward


def _backward(name: str, function: Activation) -> Callable[..., Tensor]:
    def backward(grad: Tensor, input: Tensor, quantizer: Any) -> Tensor:
        refuse_quantizer(quantizer, f"d{name}")
        return gradient_of(function, grad, input).to(grad.dtype).reshape(input.shape)

    return backward


def _backward_with_bias(backward: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    def backward_with_bias(grad: Tensor, input: Tensor, quantizer: Any) -> list[Tensor]:
        gradient = backward(grad, input, quantizer)
        bias = gradient.reshape(-1, gradient.shape[-1]).float().sum(0).to(gradient.dtype)
        return [bias, gradient]

    return backward_with_bias


def functions() -> dict[str, Callable[..., Any]]:
    """name -> kernel: `gelu`, `dgelu`, `dbias_dgelu`, `swiglu`, `dswiglu`, ..."""
    kernels: dict[str, Callable[..., Any]] = {}
    for name, function in {**UNARY, **GATED}.items():
        kernels[name] = _forward(name, function)
        kernels[f"d{name}"] = _backward(name, function)
        if name in UNARY:
            kernels[f"dbias_d{name}"] = _backward_with_bias(kernels[f"d{name}"])
    return kernels
