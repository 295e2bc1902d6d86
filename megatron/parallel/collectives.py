"""Collectives that autograd understands: each takes a tensor and a group, and its backward is the dual
collective.

The pairs (forward / backward), where a replicated tensor means the same values on every rank of the group:

| function | input -> output | forward | backward |
|---|---|---|---|
| copy_to | replicated -> replicated, used differently on each rank | nothing | all-reduce |
| reduce_from | partial sums -> replicated | all-reduce | nothing |
| all_gather | pieces -> whole, used differently on each rank | all-gather | reduce-scatter |
| gather | pieces -> whole, used alike on each rank | all-gather | own piece |
| scatter | whole, alike on each rank -> pieces | own piece | all-gather |
| reduce_scatter | partial sums -> pieces of the sum | reduce-scatter | all-gather |
| all_to_all | rows for each rank -> rows from each rank | all-to-all | all-to-all back |

A group of None has one member: every function returns its input. The `launch_*` functions are the same
without autograd and without waiting, for layers that overlap them with compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.profiler import record_function

from megatron.parallel.flight import RECORDER, Flight

# torch 2.13 renamed them and warns of the old names; 2.11 has only those.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending:
    """A collective under way; `wait()` gives its result."""

    __slots__ = ("_finish", "_flight", "_output", "_work")

    def __init__(
        self,
        output: Tensor,
        work: dist.Work | None = None,
        finish: Callable[[Tensor], Tensor] | None = None,
        flight: Flight | None = None,
    ) -> None:
        self._output, self._work, self._finish, self._flight = output, work, finish, flight

    @property
    def unfinished(self) -> Tensor:
        """The tensor that the result comes into; not to be read before `wait()`."""
        assert self._finish is None
        return self._output

    def wait(self) -> Tensor:
        """Block (on CUDA: the current stream) until the result is there, and return it."""
        if self._flight is not None:
            RECORDER.waiting(self._flight)
        if self._work is not None:
            self._work.wait()
        if self._flight is not None:
            RECORDER.ended(self._flight)
        return self._output if self._finish is None else self._finish(self._output)


def launch_all_reduce(
    x: Tensor, group: ProcessGroup | None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Pending:
    """Reduce contiguous `x` in place over the group."""
    if group is None:
        return Pending(x)
    with record_function("parallel.all_reduce"):
        flight = RECORDER.launched("all_reduce", group, (x,))
        return Pending(x, dist.all_reduce(x, op=op, group=group, async_op=True), flight=flight)


def launch_all_gather(x: Tensor, group: ProcessGroup | None) -> Pending:
    """Gather [n, ...] of every rank into [size * n, ...], by rank."""
    if group is None:
        return Pending(x)
    with record_function("parallel.all_gather"):
        x = x.contiguous()
        out = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
        flight = RECORDER.launched("all_gather", group, (x,))
        return Pending(out, _all_gather_single(out, x, group=group, async_op=True), flight=flight)


def launch_reduce_scatter(x: Tensor, group: ProcessGroup | None) -> Pending:
    """Sum [size * n, ...] over the ranks and keep this rank's [n, ...].

    gloo moves as many bytes for a reduce-scatter as for an all-reduce; there an all-to-all and a local sum in
    rank order (in fp32 for 16-bit types) move half of them.
    """
    if group is None:
        return Pending(x)
    size = group.size()
    assert x.shape[0] % size == 0, f"{x.shape[0]} rows do not divide by a group of {size}"
    with record_function("parallel.reduce_scatter"):
        x = x.contiguous()
        flight = RECORDER.launched("reduce_scatter", group, (x,))
        if dist.get_backend(group) == "gloo":
            pieces = torch.empty_like(x)
            work = dist.all_to_all_single(pieces, x, group=group, async_op=True)
            return Pending(pieces, work, lambda received: _sum_pieces(received, size), flight)
        out = x.new_empty((x.shape[0] // size, *x.shape[1:]))
        return Pending(out, _reduce_scatter_single(out, x, group=group, async_op=True), flight=flight)


def launch_all_to_all(
    x: Tensor,
    group: ProcessGroup | None,
    output_splits: Sequence[int] | None,
    input_splits: Sequence[int] | None,
) -> Pending:
    """Send `input_splits[i]` rows to rank i, receive `output_splits[i]` from it; None: equal splits."""
    if group is None:
        return Pending(x)
    with record_function("parallel.all_to_all"):
        x = x.contiguous()
        rows = x.shape[0] if output_splits is None else sum(output_splits)
        out = x.new_empty((rows, *x.shape[1:]))
        splits = [None if s is None else list(s) for s in (output_splits, input_splits)]
        flight = RECORDER.launched("all_to_all", group, (x,))
        work = dist.all_to_all_single(out, x, splits[0], splits[1], group=group, async_op=True)
        return Pending(out, work, flight=flight)


def copy_to(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Hand a replicated tensor to work that differs by rank; its gradient is summed over the group."""
    return x if group is None else _CopyTo.apply(x, group)


def reduce_from(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum of `x` over the group; the gradient (the same on every rank) passes unchanged."""
    return x if group is None else _ReduceFrom.apply(x, group)


def all_gather(x: Tensor, group: ProcessGroup | None, dim: int = 0) -> Tensor:
    """Concatenate the ranks' pieces along `dim`, for work that differs by rank; gradients: sum, own piece."""
    return x if group is None else _AllGather.apply(x, group, dim)


def gather(x: Tensor, group: ProcessGroup | None, dim: int = 0) -> Tensor:
    """Concatenate the ranks' pieces along `dim`, for work that all ranks do alike: gradients are cut."""
    return x if group is None else _Gather.apply(x, group, dim)


def scatter(x: Tensor, group: ProcessGroup | None, dim: int = 0) -> Tensor:
    """This rank's piece along `dim` of a replicated tensor."""
    return x if group is None else _Scatter.apply(x, group, dim)


def reduce_scatter(x: Tensor, group: ProcessGroup | None, dim: int = 0) -> Tensor:
    """This rank's piece along `dim` of the sum of `x` over the group."""
    return x if group is None else _ReduceScatter.apply(x, group, dim)


def all_to_all(
    x: Tensor,
    group: ProcessGroup | None,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
) -> Tensor:
    """Exchange rows (dim 0) between all ranks, see `launch_all_to_all`."""
    return Exchange(x, group, output_splits, input_splits).wait()


class Exchange:
    """An all-to-all under way in forward; `wait()` gives its result, differentiable.

    What is computed between the two is computed while rows travel, and so it is in backward: the way back is launched
    where the result's gradient is ready, and waited for where the input's gradient is wanted. Autograd runs what was
    computed in between in between. `switch` is called before each wait, in forward and in backward.
    """

    def __init__(
        self,
        x: Tensor,
        group: ProcessGroup | None,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        switch: Callable[[], None] | None = None,
    ) -> None:
        self.group, self.switch = group, switch
        self.splits = (output_splits, input_splits)
        self.forth: Pending | None = None
        self.back: Pending | None = None
        self._started: Tensor | None = x if group is None else _StartExchange.apply(x, self)

    def wait(self) -> Tensor:
        """The rows that came. To be called once."""
        # The graph holds this object, which must not hold the graph: Python's collector does not see such a circle.
        started, self._started = self._started, None
        assert started is not None, "waited for twice"
        if self.group is None:
            return started
        if self.switch is not None:
            self.switch()
        return _FinishExchange.apply(started, self)


def _sum_pieces(received: Tensor, size: int) -> Tensor:
    pieces = received.view(size, received.shape[0] // size, *received.shape[1:])
    if received.dtype in (torch.bfloat16, torch.float16):
        return pieces.sum(0, dtype=torch.float32).to(received.dtype)
    out = pieces[0]
    for piece in pieces[1:]:
        out += piece
    return out


def _gather_along(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    if dim % x.dim() == 0:
        return launch_all_gather(x, group).wait()
    return launch_all_gather(x.transpose(0, dim), group).wait().transpose(0, dim)


def _reduce_scatter_along(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    if dim % x.dim() == 0:
        return launch_reduce_scatter(x, group).wait()
    return launch_reduce_scatter(x.transpose(0, dim), group).wait().transpose(0, dim)


def _own_piece(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    length, size = x.shape[dim], group.size()
    if length % size:
        raise ValueError(
            f"dim {dim} of a tensor of shape {tuple(x.shape)} does not divide by a group of {size}"
        )
    return x.narrow(dim, group.rank() * (length // size), length // size).contiguous()


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return launch_all_reduce(grad.clone(memory_format=torch.contiguous_format), ctx.group).wait(), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return launch_all_reduce(x.clone(memory_format=torch.contiguous_format), group).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _gather_along(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _reduce_scatter_along(grad, ctx.group, ctx.dim), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _gather_along(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _own_piece(grad, ctx.group, ctx.dim), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _own_piece(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _gather_along(grad, ctx.group, ctx.dim), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _reduce_scatter_along(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _gather_along(grad, ctx.group, ctx.dim), None, None


class _StartExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        output_splits, input_splits = exchange.splits
        exchange.forth = launch_all_to_all(x, exchange.group, output_splits, input_splits)
        return exchange.forth.unfinished

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        exchange = ctx.exchange
        if exchange.switch is not None:
            exchange.switch()
        back, exchange.back = exchange.back, None
        assert back is not None
        return back.wait(), None


class _FinishExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        forth, exchange.forth = exchange.forth, None  # it holds a tensor of the graph
        assert forth is not None
        forth.wait()
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        exchange = ctx.exchange
        output_splits, input_splits = exchange.splits
        exchange.back = launch_all_to_all(grad, exchange.group, input_splits, output_splits)
        return grad, None  # of the right shape; what counts is on its way
