"""Tensor-parallel linear: one autograd function for every cut of the weight, with fused wgrad and overlapped
input-gradient communication.

Note "Overlap": in backward of a column-cut weight the input gradient is launched into its all-reduce
(sequence
parallelism: reduce-scatter) before the weight-gradient GEMM runs, and under sequence parallelism the input is
gathered again while the input-gradient GEMM runs. Megatron-LM, "Reducing Activation Recomputation in Large
Transformer Models" (arXiv:2205.05198), section 4.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from megatron.parallel import wgrad
from megatron.parallel.collectives import (
    Pending,
    launch_all_gather,
    launch_all_reduce,
    launch_reduce_scatter,
    reduce_from,
    reduce_scatter,
)


@dataclass(frozen=True)
class LinearPlan:
    """What a linear does besides its GEMM; made once per layer.

    Attributes:
        group: tensor-parallel group that the weight is cut over by column; None: no communication.
        gather_input: the input is this rank's piece of dim 0 (sequence parallelism), else it is replicated.
        fused: weight gradient goes into main_grad (wgrad.py, note "The contract").
        store: of a layer whose weight gradients are delayed.
    """

    group: ProcessGroup | None = None
    gather_input: bool = False
    fused: bool = False
    store: wgrad.WeightGradientStore | None = None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, plan: LinearPlan) -> Tensor:
    """x[..., i] weight[o, i]^T + bias[o] -> [..., o], with the communication of `plan`.

    With `plan.gather_input` x is [s / size, ..., i] and the result [s, ..., o].
    """
    return _Linear.apply(x, weight, bias, plan)


def row_linear(
    x: Tensor, weight: Tensor, plan: LinearPlan, group: ProcessGroup | None, sequence_parallel: bool
) -> Tensor:
    """Linear whose weight [o, i / size] is cut by row over `group`: x[s, ..., i / size] -> sum over the
    group.

    Gives [s, ..., o], under sequence parallelism this rank's [s / size, ..., o].
    """
    partial = linear(x, weight, None, plan)
    return reduce_scatter(partial, group) if sequence_parallel else reduce_from(partial, group)


def rows(x: Tensor) -> Tensor:
    """View [..., n] as contiguous [rows, n]; copies only where the strides need it."""
    return x.reshape(-1, x.shape[-1]).contiguous()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: LinearPlan) -> Tensor:
        ctx.plan = plan
        # The parameter itself is kept, not a saved tensor: backward needs its attributes, and FSDP fills its
        # storage again in between.
        ctx.weight = weight
        ctx.accumulate = plan.fused and wgrad.accumulates(weight)
        ctx.input_shape = x.shape
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None)
        whole = launch_all_gather(x, plan.group).wait() if plan.gather_input else x
        return F.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        plan, weight = ctx.plan, ctx.weight
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        (x,) = ctx.saved_tensors
        buffer = wgrad.fetch_main_grad(weight) if plan.fused and needs_weight else None
        whole = _gather_again(x, plan) if needs_weight else None
        grad = rows(grad_output)
        input_grad = _launch_input_grad(grad, weight, plan, ctx.input_shape) if needs_input else None
        weight_grad = None
        if whole is not None:
            weight_grad = wgrad.settle_weight_gradient(
                weight, buffer, ctx.accumulate, lambda: (grad, rows(whole.wait())), plan.store
            )
        bias_grad = grad.sum(0) if needs_bias else None
        return None if input_grad is None else input_grad.wait(), weight_grad, bias_grad, None


def _gather_again(x: Tensor, plan: LinearPlan) -> Pending:
    return launch_all_gather(x, plan.group) if plan.gather_input else Pending(x)


def _launch_input_grad(grad: Tensor, weight: Tensor, plan: LinearPlan, shape: torch.Size) -> Pending:
    input_grad = grad @ weight
    if plan.group is None:
        return Pending(input_grad.view(shape))
    if plan.gather_input:
        whole = input_grad.view(shape[0] * plan.group.size(), *shape[1:])
        return launch_reduce_scatter(whole, plan.group)
    return launch_all_reduce(input_grad.view(shape), plan.group)
