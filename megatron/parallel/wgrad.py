"""Weight gradients straight into a buffer that the data-parallel wrapper owns ("fused wgrad"), and delayed
ones.

Note "The contract", layer side, in five lines (docs/main_grad_contract.md has the rest; FSDP owns the other
side):
  1. In forward the layer reads and remembers `weight.overwrite_main_grad` (absent: False, accumulate).
  2. At the start of its backward it fetches the buffer, once per use: `weight.get_main_grad()` where the
  weight has
     `__fsdp_param__`, else `weight.main_grad`.
  3. The GEMM writes it with beta 0 (overwrite: what was there, NaN included, is ignored) or beta 1
  (accumulate). 4. Where the weight has `grad_added_to_main_grad` it is set to True; autograd gets None and
  `.grad` stays None. 5. With delayed wgrad 2 and 4 still happen in backward; `backward_dw()` writes the
  buffer fetched then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.profiler import record_function


def accumulates(weight: Tensor) -> bool:
    """What the owner of the buffer wants of this use: True: add, False: overwrite. To be asked in forward."""
    return not getattr(weight, "overwrite_main_grad", False)


def fetch_main_grad(weight: Tensor) -> Tensor:
    """Fetch the buffer for one use of `weight`, in backward, and announce that its gradient goes there.

    Raises RuntimeError where there is no buffer or it does not fit the weight.
    """
    if hasattr(weight, "__fsdp_param__"):
        buffer = weight.get_main_grad()  # type: ignore[attr-defined]
    else:
        buffer = getattr(weight, "main_grad", None)
    if not isinstance(buffer, Tensor):
        raise RuntimeError(
            f"fuse_wgrad_accumulation: the weight of shape {tuple(weight.shape)} has no main_grad buffer; "
            "wrap the "
            "model (FSDP, DDP) before backward or build its layers with fuse_wgrad_accumulation=False"
        )
    if buffer.shape != weight.shape or not buffer.is_contiguous():
        raise RuntimeError(
            f"fuse_wgrad_accumulation: main_grad of shape {tuple(buffer.shape)}, "
            f"contiguous={buffer.is_contiguous()}, "
            f"for a weight of shape {tuple(weight.shape)}; it must be contiguous and of the same shape"
        )
    if hasattr(weight, "grad_added_to_main_grad"):
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return buffer


def add_weight_gradient(buffer: Tensor, grad_output: Tensor, x: Tensor, accumulate: bool) -> None:
    """buffer[o, i] = accumulate * buffer + grad_output[n, o]^T x[n, i], summed in the buffer's precision.

    The buffer may have the operands' dtype or a wider one. Rows n may be 0.
    """
    with record_function("parallel.wgrad"):
        if grad_output.shape[0] == 0:
            if not accumulate:
                buffer.zero_()
            return
        beta = 1.0 if accumulate else 0.0
        if buffer.dtype != x.dtype:
            if torch.promote_types(buffer.dtype, x.dtype) != buffer.dtype:
                _add_narrowed(buffer, grad_output, x, accumulate)
                return
            if buffer.is_cuda and _cuda_widening_gemm(buffer.device, x.dtype, buffer.dtype):
                torch.addmm(buffer, grad_output.t(), x, out_dtype=buffer.dtype, beta=beta, out=buffer)
                return
            # No GEMM with a wider output here. Converting operands and not the result keeps the sum in full
            # precision, and on CPU the fp32 GEMM is the faster one as well.
            grad_output, x = grad_output.to(buffer.dtype), x.to(buffer.dtype)
        buffer.addmm_(grad_output.t(), x, beta=beta)


def _add_narrowed(buffer: Tensor, grad_output: Tensor, x: Tensor, accumulate: bool) -> None:
    product = grad_output.t() @ x
    if accumulate:
        buffer.add_(product)
    else:
        buffer.copy_(product)


@cache
def _cuda_widening_gemm(device: torch.device, operand: torch.dtype, result: torch.dtype) -> bool:
    """Whether this torch has a GEMM from `operand` to `result` on the device: tried with a small one."""
    if operand not in (torch.bfloat16, torch.float16) or result != torch.float32:
        return False
    a = torch.ones(16, 16, device=device, dtype=operand)
    out = torch.ones(16, 16, device=device, dtype=result)
    try:
        torch.addmm(out, a, a, out_dtype=result, beta=1.0, out=out)
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return bool((out == 17).all())


class WeightGradientStore:
    """Weight gradients that wait for `backward_dw()`, first in, first out (TE: `module.wgrad_store`)."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._waiting: deque[Callable[[], None]] = deque()

    def delay_wgrad_compute(self) -> bool:
        """Whether weight gradients are delayed."""
        return self._enabled

    def put(self, compute: Callable[[], None]) -> None:
        """Keep the work of one use for later."""
        self._waiting.append(compute)

    def pop(self) -> None:
        """Do the oldest work that waits; RuntimeError where none does."""
        if not self._waiting:
            raise RuntimeError("backward_dw() was called more often than backward")
        with record_function("parallel.delayed_wgrad"):
            self._waiting.popleft()()

    def __len__(self) -> int:
        return len(self._waiting)


def add_to_grad(weight: Tensor, gradient: Tensor) -> None:
    """Add a delayed, unfused gradient to `weight.grad`."""
    weight.grad = gradient if weight.grad is None else weight.grad + gradient


def settle_weight_gradient(
    weight: Tensor,
    buffer: Tensor | None,
    accumulate: bool,
    operands: Callable[[], tuple[Tensor, Tensor]],
    store: WeightGradientStore | None,
) -> Tensor | None:
    """Compute the gradient of one use of `weight` now, or keep it in `store`; return what autograd shall get.

    Args:
        weight: the parameter, [o, i].
        buffer: what `fetch_main_grad` gave, or None where wgrad is not fused.
        accumulate: what `accumulates` said in forward.
        operands: gives (grad_output [n, o], x [n, i]); called once, now.
        store: of a layer with delayed wgrad, else None.
    """
    grad_output, x = operands()

    def compute() -> Tensor | None:
        if buffer is None:
            return grad_output.t() @ x
        add_weight_gradient(buffer, grad_output, x, accumulate)
        return None

    if store is None or not store.delay_wgrad_compute():
        return compute()

    def compute_later() -> None:
        with torch.no_grad():
            gradient = compute()
            if gradient is not None:
                add_to_grad(weight, gradient)

    store.put(compute_later)
    return None
