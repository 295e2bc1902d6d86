"""The flex dispatcher: libraries that move tokens between experts in one kernel, behind one small protocol.

A token travels once to each rank that has any of its experts, and is copied to them there; outputs are weighted and
summed on that rank before they travel back. The libraries are optional (megatron/parallel/expert/deepep.py); tests
put a fake one over gloo behind the same protocol.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.parallel.expert import permute as p
from megatron.parallel.expert.dispatch import Dispatched, ExpertGrid, nothing
from megatron.parallel.expert.permute import Routing


class FlexBuffer(Protocol):
    """What the dispatcher needs of a library. No method is differentiable; all are collective over the ranks."""

    def dispatch(
        self, tokens: Tensor, experts: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        """Send each token once to every rank that has one of its experts.

        tokens [t, h], experts [t, k] int64 of the whole layer, weights [t, k] fp32. Returns received tokens [r, h],
        their experts [r, n] numbered on this rank (-1: not of this rank), their weights [r, n], and a handle; n is k,
        or 1 where a token comes once for each of its experts.
        """

    def dispatch_again(self, tokens: Tensor, handle: Any) -> Tensor:
        """Send other values [t, h] the same way: [r, h]."""

    def combine(self, rows: Tensor, weights: Tensor | None, handle: Any) -> tuple[Tensor, Tensor | None]:
        """Bring values back and sum them by token: rows [r, h] -> [t, h]; weights [r, n] -> [t, k] if given."""


class FlexDispatcher:
    """Dispatcher over a `FlexBuffer` (see megatron/parallel/expert/dispatch.py, note "The protocol")."""

    def __init__(self, grid: ExpertGrid, buffer: FlexBuffer) -> None:
        if grid.etp_size > 1:
            raise ValueError(
                f"--moe-token-dispatcher-type flex with --expert-tensor-parallel-size {grid.etp_size}: use 1, or "
                "--moe-token-dispatcher-type alltoall"
            )
        self.grid, self.buffer = grid, buffer

    def dispatch(
        self, tokens: Tensor, routing: Routing, meanwhile: Callable[[], None] = nothing
    ) -> Dispatched:
        """See `Dispatcher.dispatch`."""
        assert routing.capacity is None, "the flex dispatcher is dropless"
        meanwhile()
        local = self.grid.num_local
        weights = routing.weights.to(torch.promote_types(routing.weights.dtype, torch.float32))
        call = _Call(self.buffer, routing.experts)
        received, received_weights = _Dispatch.apply(tokens, weights, call)
        experts = torch.where(call.experts < 0, local, call.experts)
        splits: list[int] = p.tokens_per_expert(experts, local).tolist()
        order = p.expert_order(experts)[: sum(splits)]

        def combine(rows: Tensor) -> Tensor:
            summed = p.unpermute(rows, order, received_weights).to(tokens.dtype)
            return _Combine.apply(summed, call)

        return Dispatched(p.permute(received, order, call.experts.shape[1]), splits, combine)


class _Call:
    """One dispatch: the experts that went out and, after it, those that came and the library's handle."""

    def __init__(self, buffer: FlexBuffer, experts: Tensor) -> None:
        self.buffer, self.experts = buffer, experts
        self.handle: Any = None


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weights: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
        ctx.call = call
        received, call.experts, received_weights, call.handle = call.buffer.dispatch(
            tokens, call.experts, weights
        )
        return received, received_weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor, weights_grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        call = ctx.call
        tokens, weights = call.buffer.combine(grad.contiguous(), weights_grad.contiguous(), call.handle)
        return tokens, weights, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, call: _Call) -> Tensor:
        ctx.call = call
        return call.buffer.combine(rows.contiguous(), None, call.handle)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return ctx.call.buffer.dispatch_again(grad.contiguous(), ctx.call.handle), None


def flex_buffer(backend: str, grid: ExpertGrid) -> FlexBuffer:
    """The library that ``--moe-flex-dispatcher-backend`` names; ValueError where it is not installed or not known."""
    if grid.ep is None:
        raise ValueError(
            "--moe-token-dispatcher-type flex needs --expert-model-parallel-size 2 or more: raise it, or use "
            "--moe-token-dispatcher-type alltoall"
        )
    from megatron.parallel.expert.deepep import BUFFERS

    if backend not in BUFFERS:
        raise ValueError(f"--moe-flex-dispatcher-backend {backend} is not there: use {' or '.join(BUFFERS)}")
    return BUFFERS[backend](grid)
