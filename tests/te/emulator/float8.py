"""FP8 with one scale a tensor (delayed and current scaling): quantisation, transposes, the update of scales.

As on Hopper: GEMMs read the rows of an operand from its data, the columns from a transposed copy.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.te.emulator.values import DType, refuse, torch_dtype

FORMATS = {
    DType.kFloat8E4M3: (torch.float8_e4m3fn, 448.0),
    DType.kFloat8E5M2: (torch.float8_e5m2, 57344.0),
}
"""Format -> (dtype, largest value)."""
LARGEST = torch.finfo(torch.float32).max
QUANTIZERS = ("Float8Quantizer", "Float8CurrentScalingQuantizer")


def _te() -> Any:
    return importlib.import_module("transformer_engine.pytorch.tensor.float8_tensor")


def is_float8(tensor: Any) -> bool:
    """Whether `tensor` is TE's Float8Tensor or its storage."""
    return hasattr(tensor, "_fp8_dtype") and hasattr(tensor, "_scale_inv") and hasattr(tensor, "_transpose")


def transposed(data: Tensor) -> Tensor:
    """[..., n] -> [n, ...], contiguous."""
    return data.movedim(-1, 0).contiguous()


def _absolute_maximum(x: Tensor) -> Tensor:
    return x.abs().max().float().reshape(1) if x.numel() else torch.zeros(1)


def current_scale(quantizer: Any, x: Tensor, largest: float) -> Tensor:
    """Scale [1] from the maximum of `x` (over the quantizer's group of ranks, if it has one)."""
    amax = _absolute_maximum(x)
    if quantizer.with_amax_reduction:
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=quantizer._canonicalized_amax_reduction_group())
    amax = amax.clamp(min=quantizer.amax_epsilon)
    scale = (largest / amax).clamp(max=LARGEST)
    scale = torch.where((amax > 0) & amax.isfinite(), scale, torch.ones(1))
    return torch.exp2(scale.log2().floor()) if quantizer.force_pow_2_scales else scale


def _scale(quantizer: Any, x: Tensor, largest: float) -> Tensor:
    if type(quantizer).__name__ == "Float8Quantizer":
        quantizer.amax.copy_(
            torch.maximum(quantizer.amax, _absolute_maximum(x).reshape(quantizer.amax.shape))
        )
        return quantizer.scale.detach().float().reshape(1).clone()
    return current_scale(quantizer, x, largest)


def quantized(tensor: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    """`tensor` in FP8: a new Float8Tensor (or storage, where the quantizer is internal), or written into
    `output`.

    Casts saturate. Raises NotEmulated for quantizers of other formats.
    """
    if type(quantizer).__name__ not in QUANTIZERS:
        refuse(f"quantize with {type(quantizer).__name__}")
    if noop is not None and bool(noop):
        return output
    dtype, largest = FORMATS[DType(int(quantizer.dtype))]
    x = tensor.detach().float()
    scale = _scale(quantizer, x, largest)
    data = (x * scale).clamp(-largest, largest).to(dtype).view(torch.uint8)
    if output is None:
        columns = transposed(data) if quantizer.columnwise_usage else None
        return _new(data if quantizer.rowwise_usage else None, columns, scale, tensor, quantizer)
    if output._data is not None:
        output._data.copy_(data)
    if output._transpose is not None:
        output._transpose.copy_(transposed(data))
        output._transpose_invalid = False
    output._scale_inv.copy_(1 / scale)
    return output


def _new(rows: Tensor | None, columns: Tensor | None, scale: Tensor, source: Tensor, quantizer: Any) -> Any:
    parts: dict[str, Any] = {"data": rows, "data_transpose": columns, "fp8_scale_inv": 1 / scale}
    parts |= {"fp8_dtype": quantizer.dtype, "quantizer": quantizer}
    if quantizer.internal:
        return _te().Float8TensorStorage(**parts, fake_dtype=source.dtype)
    return _te().Float8Tensor(
        shape=source.shape, dtype=source.dtype, device=source.device, requires_grad=False, **parts
    )


def create_empty_quantized_tensor(
    quantizer: Any, shape: list[int], dtype: torch.dtype, device: Any = None, pin_memory: bool = False
) -> Any:
    """A Float8Tensor of zeros."""
    return quantized(torch.zeros(shape, dtype=dtype), quantizer)


def operand(tensor: Any, by_rows: bool) -> Tensor:
    """What a GEMM reads of an operand, in fp32: [..., n] of a Float8Tensor; other tensors as they are.

    by_rows: whether the inner dim is the last. Raises RuntimeError where the needed copy is not there.
    """
    if not is_float8(tensor):
        if not isinstance(tensor, Tensor):
            refuse(f"a GEMM on {type(tensor).__name__}")
        return tensor
    dtype = FORMATS[DType(int(tensor._fp8_dtype))][0]
    if by_rows:
        if tensor._data is None:
            raise RuntimeError("GEMM of FP8 operands: the row-wise data is missing")
        return tensor._data.view(dtype).float() * tensor._scale_inv
    if tensor._transpose is None or tensor._transpose_invalid:
        raise RuntimeError("GEMM of FP8 operands: the transposed data is missing")
    return tensor._transpose.view(dtype).float().movedim(0, -1) * tensor._scale_inv


def check_operands(a: Any, b: Any) -> None:
    """Raise RuntimeError for pairs that cuBLASLt does not multiply."""
    if is_float8(a) != is_float8(b):
        raise RuntimeError(f"GEMM of an FP8 operand and another: {type(a).__name__} x {type(b).__name__}")
    if is_float8(a) and int(a._fp8_dtype) == int(b._fp8_dtype) == DType.kFloat8E5M2:
        raise RuntimeError("no cuBLASLt GEMM E5M2 x E5M2")


def dequantize(tensor: Any, otype: Any) -> Tensor:
    """A Float8Tensor with rows, in dtype `otype`."""
    if not is_float8(tensor):
        refuse(f"dequantize of {type(tensor).__name__}")
    dtype = torch_dtype(otype)
    assert dtype is not None
    return operand(tensor, by_rows=True).to(dtype)


def fp8_transpose(input: Tensor, otype: Any, *, out: Tensor | None = None) -> Tensor:
    """[..., n] -> [n, ...] of the raw bytes."""
    result = transposed(input)
    return result if out is None else out.copy_(result)


def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: Tensor,
    amax_histories: list[Tensor],
    scales: list[Tensor],
    amax_compute_algo: str,
    fp8_dtype: Any,
    margin: float,
) -> None:
    """Delayed scaling after a pass: take the reduced maxima into the histories, find scales, roll.

    amax_histories: [length, tensors] each; scales: [tensors] each.
    """
    largest = FORMATS[DType(int(fp8_dtype))][1]
    start = 0
    for history, scale in zip(amax_histories, scales, strict=True):
        fresh = amax_reduction_buffer[start : start + scale.numel()]
        start += scale.numel()
        history[0] = torch.where(fresh != 0, fresh, history[0])
        amax = history.max(0).values if amax_compute_algo == "max" else history[0].clone()
        history.copy_(history.roll(-1, 0))
        history[0] = 0
        found = (largest / amax / 2**margin).clamp(max=LARGEST)
        scale.copy_(torch.where((amax > 0) & amax.isfinite(), found, scale))


FUNCTIONS = (
    create_empty_quantized_tensor,
    dequantize,
    fp8_transpose,
    fused_amax_and_scale_update_after_reduction,
)
