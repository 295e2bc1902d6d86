"""GEMMs as cuBLASLt does them, stated for row-major tensors, with its refusals."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.te.emulator.activations import gelu, gradient_of
from tests.te.emulator.float8 import check_operands, is_float8, operand
from tests.te.emulator.values import refuse, refuse_quantizer, torch_dtype


@dataclass(frozen=True)
class GemmRecord:
    """One GEMM that ran: which operands were transposed, what it wrote, whether it added (beta 1) or overwrote,
    and whether its operands were in FP8.
    """

    transposed: tuple[bool, bool]
    shape: tuple[int, ...]
    accumulate: bool
    gradient: bool
    output_address: int
    output_dtype: torch.dtype
    float8: bool = False


@dataclass
class GemmLog:
    """The GEMMs of the process so far."""

    records: list[GemmRecord] = field(default_factory=list)


LOG = GemmLog()
"""Reached by tests as `transformer_engine_torch.gemm_log`."""


def _check_output(out: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if not out.is_contiguous():
        raise ValueError("Output tensor is not contiguous.")
    if tuple(out.shape) != shape:
        raise RuntimeError(f"GEMM output has invalid dims (expected {shape}, got {tuple(out.shape)})")
    if out.dtype != dtype:
        raise RuntimeError(f"GEMM output has invalid dtype ({dtype} vs {out.dtype})")


def _operands(a: Tensor, transpose_a: bool, b: Tensor, transpose_b: bool) -> tuple[Tensor, Tensor]:
    if a.dtype == torch.float64 or b.dtype == torch.float64:
        refuse("a GEMM on torch.float64")
    if a.dtype != b.dtype:
        raise RuntimeError(f"GEMM operands differ in dtype: {a.dtype} vs {b.dtype}")
    left, right = (b.t() if transpose_b else b), (a.t() if transpose_a else a)
    if left.shape[1] != right.shape[0]:
        raise RuntimeError(f"GEMM inner dims: {tuple(left.shape)} x {tuple(right.shape)}")
    return left, right


@dataclass(frozen=True)
class Epilogue:
    """What a GEMM does besides the product: bias (or its gradient), GELU (or its derivative), scale,
    accumulation.
    """

    bias: Tensor | None = None
    gradient: bool = False
    gelu: bool = False
    gelu_input: Tensor | None = None
    accumulate: bool = False
    alpha: float = 1.0
    beta: float | None = None


def multiply(
    operands: tuple[Any, bool, Any, bool], out: Tensor | None, out_dtype: Any, epilogue: Epilogue
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """out = op(b) @ op(a) in fp32, with the epilogue; returns (out, bias gradient, input of GELU).

    operands: (a, transpose a, b, transpose b), TE's order. out: contiguous, of the operands' dtype or fp32,
    or None. Of operands in FP8 the output may have any dtype, but must be told it.
    """
    a, transpose_a, b, transpose_b = operands
    check_operands(a, b)
    float8 = is_float8(a)
    a, b = operand(a, by_rows=transpose_a), operand(b, by_rows=not transpose_b)
    leading = b.shape[:-1]
    a, b = a.detach().reshape(-1, a.shape[-1]), b.detach().reshape(-1, b.shape[-1])
    left, right = _operands(a, transpose_a, b, transpose_b)
    dtype = torch_dtype(out_dtype) or a.dtype
    if not float8 and dtype not in (a.dtype, torch.float32):
        raise RuntimeError(f"no cuBLASLt GEMM {a.dtype} x {b.dtype} -> {dtype}")
    product = left.float() @ right.float()
    shape = tuple(product.shape) if transpose_b else (*leading, product.shape[-1])
    if out is not None:
        _check_output(out, shape, dtype)
    if epilogue.alpha != 1.0:
        product = product * epilogue.alpha
    bias_gradient = gelu_input = None
    if epilogue.bias is not None:
        if epilogue.gradient:
            bias_gradient = b.float().sum(0).to(dtype)
        else:
            product = product + epilogue.bias.detach().float()
    if epilogue.gelu and not epilogue.gradient:
        gelu_input = product.to(dtype).reshape(shape)
        product = F.gelu(product, approximate="tanh")
    elif epilogue.gelu:
        assert epilogue.gelu_input is not None
        product = gradient_of(gelu, product, epilogue.gelu_input.reshape(product.shape))
    out = _store(product.reshape(shape), out, dtype, epilogue)
    LOG.records.append(
        GemmRecord(
            (transpose_a, transpose_b),
            shape,
            epilogue.accumulate,
            epilogue.gradient,
            out.data_ptr(),
            dtype,
            float8,
        )
    )
    return out, bias_gradient, gelu_input


def _store(product: Tensor, out: Tensor | None, dtype: torch.dtype, epilogue: Epilogue) -> Tensor:
    if out is None:
        return product.to(dtype)
    if epilogue.accumulate:
        beta = 1.0 if epilogue.beta is None else epilogue.beta
        out.detach().copy_(out.detach().float() * beta + product)
    else:  # beta 0 never reads the old contents, so NaN there is harmless
        out.detach().copy_(product)
    return out


def generic_gemm(
    A: Tensor,
    transa: bool,
    B: Tensor,
    transb: bool,
    D: Tensor | None,
    quantizer: Any,
    out_dtype: Any,
    bias: Tensor | None,
    bias_type: Any,
    gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    workspace: Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Tensor | None = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> list[Tensor | None]:
    """The extension's entry point; its argument list is TE's, not ours."""
    refuse_quantizer(quantizer, "generic_gemm")
    if comm_overlap is not None:
        refuse("generic_gemm overlapped with communication")
    if not accumulate and beta:
        raise RuntimeError("Trying to use non-zero beta while not accumulating")
    epilogue = Epilogue(bias, grad, gelu, gelu_in, accumulate, alpha, beta)
    return [*multiply((A, transa, B, transb), D, out_dtype, epilogue), extra_output]


def te_general_grouped_gemm(
    A: list[Tensor],
    transa: bool,
    B: list[Tensor],
    transb: bool,
    D: list[Tensor],
    D_type: Any,
    m_splits: list[int],
    bias: list[Tensor],
    bias_type: Any,
    single_output: bool,
    pre_gelu_out: list[Tensor],
    grad: bool,
    *launch: Any,
) -> list[Tensor]:
    """One GEMM per expert; an expert without tokens is zeroed when overwriting and left alone when
    accumulating.

    launch: workspace(s), their size, accumulate, split accumulator, number of multiprocessors.
    """
    accumulate = bool(launch[2])
    start = 0
    for index, (a, b) in enumerate(zip(A, B, strict=True)):
        if not single_output:
            out = D[index]
        elif transb:
            out = D[0][index]
        else:
            out = D[0].detach()[start : start + b.shape[0]]
            start += b.shape[0]
        has_bias = bias[index].numel() != 0
        if 0 in a.size() or 0 in b.size():
            _idle_expert(out, bias[index] if has_bias and grad else None, accumulate, grad)
            continue
        epilogue = Epilogue(bias[index] if has_bias else None, grad, accumulate=accumulate)
        _, bias_gradient, _ = multiply((a, transa, b, transb), out, D_type, epilogue)
        if bias_gradient is not None:
            bias[index].copy_(bias_gradient)
    return bias


def _idle_expert(out: Tensor, bias: Tensor | None, accumulate: bool, gradient: bool) -> None:
    if out.numel() and not accumulate:
        out.detach().zero_()
    if bias is not None:
        bias.zero_()
    LOG.records.append(
        GemmRecord((False, False), tuple(out.shape), accumulate, gradient, out.data_ptr(), out.dtype)
    )


FUNCTIONS = (generic_gemm, te_general_grouped_gemm)
