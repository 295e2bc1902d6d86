"""Tensor helpers and the multi-tensor kernels of TE's optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.te.emulator.float8 import is_float8, quantized


def quantize(tensor: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    """`tensor` in the quantizer's format; itself without one."""
    if quantizer is None or is_float8(tensor):
        return tensor
    return quantized(tensor, quantizer, output, noop)


def bgrad_quantize(input: Tensor, quantizer: Any) -> list[Any]:
    """[bias gradient, input, quantised]."""
    x = input.contiguous()
    return [x.reshape(-1, x.shape[-1]).float().sum(0).to(x.dtype), quantize(x, quantizer)]


def split_quantize(
    tensor: Tensor, split_sections: list[int], quantizers: list[Any], disable_bulk_allocation: bool = False
) -> list[Any]:
    """The pieces of `tensor` along its first dim, each quantised by its own quantizer."""
    pieces = torch.split(tensor, list(split_sections))
    return [quantize(piece, quantizer) for piece, quantizer in zip(pieces, quantizers, strict=True)]


def swap_first_dims(tensor: Tensor, out: Tensor | None = None) -> Tensor:
    """Dims 0 and 1 exchanged, contiguous."""
    result = tensor.transpose(0, 1).contiguous()
    return result if out is None else out.copy_(result)


def multi_tensor_scale(chunk: int, flag: Tensor, lists: list[list[Tensor]], scale: float) -> None:
    """lists: sources, destinations."""
    for source, destination in zip(*lists, strict=True):
        destination.copy_(source.float() * scale)


def multi_tensor_l2norm(
    chunk: int, flag: Tensor, lists: list[list[Tensor]], per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """(norm over all tensors [1], norm of each)."""
    norms = torch.stack([tensor.float().norm() for tensor in lists[0]])
    return norms.norm().reshape(1), (norms if per_tensor else torch.empty(0))


def multi_tensor_adam(
    chunk: int,
    flag: Tensor,
    lists: list[list[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: bool,
    weight_decay: float,
) -> None:
    """lists: gradients, parameters, first and second moments, fp32 parameters (optional). mode: 0 L2, 1
    AdamW.
    """
    correction1 = 1 - beta1**step if bias_correction else 1.0
    correction2 = 1 - beta2**step if bias_correction else 1.0
    for tensors in zip(*lists, strict=True):
        gradient, parameter, first, second = tensors[:4]
        main = tensors[4] if len(tensors) > 4 else parameter
        g, p = gradient.float(), main.float()
        if mode == 0:
            g = g + weight_decay * p
        first.copy_(beta1 * first.float() + (1 - beta1) * g)
        second.copy_(beta2 * second.float() + (1 - beta2) * g * g)
        update = (first.float() / correction1) / ((second.float() / correction2).sqrt() + eps)
        if mode == 1:
            update = update + weight_decay * p
        main.copy_(p - lr * update)
        if main is not parameter:
            parameter.copy_(main)


FUNCTIONS = (
    quantize,
    bgrad_quantize,
    split_quantize,
    swap_first_dims,
    multi_tensor_scale,
    multi_tensor_l2norm,
    multi_tensor_adam,
)
