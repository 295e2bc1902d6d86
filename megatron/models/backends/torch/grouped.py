"""GroupedLinear on plain torch: the Linears of several experts, each on its own rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron.models.backends.base import LayerOptions
from megatron.models.backends.torch.delayed import DelayedWeightGradients
from megatron.models.backends.torch.parameters import ZEROS, Cut, new_parameter
from megatron.models.init import InitSpec
from megatron.parallel import wgrad
from megatron.parallel.tensor import LinearPlan


class GroupedLinear(DelayedWeightGradients):
    """y_i = x_i W_i^T + b_i for expert i. Arguments as Backend.GroupedLinear, and LayerOptions or its fields.

    With `fuse_wgrad_accumulation` weight gradients go into main_grad (note "The contract" in
    megatron/parallel/wgrad.py), an idle expert's too: zero where overwriting, untouched where accumulating.
    The decision is weight0's for all of them, as in Transformer Engine.
    """

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        return_bias: bool = False,
        parallel_mode: str | None = None,
        init_std: float = 0.02,
        tensor_parallel_parts: int = 1,
        name: str = "",
        options: LayerOptions | None = None,
        **layer_options: Any,
    ) -> None:
        options = options or LayerOptions(**layer_options)
        super().__init__(options.delay_wgrad_compute)
        cut = Cut(parallel_mode, True, tensor_parallel_parts, name or "GroupedLinear")
        if parallel_mode == "row" and options.expert_tp_size > 1 and bias and not return_bias:
            raise ValueError(
                f"{cut.name}: a row-parallel bias would be added on each of {options.expert_tp_size} "
                "expert-tensor "
                "ranks; use bias=False or return_bias=True"
            )
        shape = cut.local_shape(in_features, out_features, options)
        self.num_gemms, self.return_bias, self.use_bias = num_gemms, return_bias, bias
        for i in range(num_gemms):
            weight = new_parameter(
                shape, options, InitSpec("normal", init_std), cut.weight_annotation(options)
            )
            made = new_parameter(shape[:1], options, ZEROS, cut.bias_annotation(options)) if bias else None
            self.register_parameter(f"weight{i}", weight)
            self.register_parameter(f"bias{i}", made)
        self.mark_delayed()
        self.plan = LinearPlan(
            fused=options.fuse_wgrad_accumulation,
            store=self.wgrad_store if options.delay_wgrad_compute else None,
        )

    def gemm_weights(self) -> list[Tensor]:
        """The weights whose gradients backward_dw() computes."""
        return [getattr(self, f"weight{i}") for i in range(self.num_gemms)]

    def biases(self) -> list[Tensor | None]:
        """The experts' biases."""
        return [getattr(self, f"bias{i}") for i in range(self.num_gemms)]

    def forward(self, x: Tensor, m_splits: Sequence[int] | Tensor) -> Any:
        """x [tokens, in] -> [tokens, out] or (that, list of biases); m_splits: tokens of each expert, in
        order.

        Raises ValueError where m_splits does not fit x or the number of experts.
        """
        splits = m_splits.tolist() if isinstance(m_splits, Tensor) else [int(m) for m in m_splits]
        if len(splits) != self.num_gemms or sum(splits) != x.shape[0]:
            raise ValueError(f"m_splits={splits} for {self.num_gemms} experts and {x.shape[0]} tokens")
        biases = self.biases() if self.use_bias and not self.return_bias else []
        out = _GroupedLinear.apply(x, splits, self.plan, *self.gemm_weights(), *biases)
        return (out, self.biases() if self.use_bias else None) if self.return_bias else out


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, splits: list[int], plan: LinearPlan, *parameters: Tensor) -> Tensor:
        count = len(splits)
        weights, biases = parameters[:count], parameters[count:]
        ctx.splits, ctx.plan, ctx.weights, ctx.has_bias = splits, plan, weights, bool(biases)
        ctx.needs_weight = ctx.needs_input_grad[3]
        ctx.accumulate = plan.fused and wgrad.accumulates(weights[0])
        ctx.save_for_backward(x if any(ctx.needs_input_grad[3 : 3 + count]) else None)
        out = x.new_empty((x.shape[0], weights[0].shape[0]))
        for i, (piece, target) in enumerate(zip(x.split(splits), out.split(splits), strict=True)):
            if not piece.shape[0]:
                continue
            if biases:
                torch.addmm(biases[i], piece, weights[i].t(), out=target)
            else:
                torch.mm(piece, weights[i].t(), out=target)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        plan, weights, splits, count = ctx.plan, ctx.weights, ctx.splits, len(ctx.splits)
        (x,) = ctx.saved_tensors
        needs_weight = ctx.needs_input_grad[3 : 3 + count]
        buffers = [
            wgrad.fetch_main_grad(weight) if plan.fused and needed else None
            for weight, needed in zip(weights, needs_weight, strict=True)
        ]
        grad = grad.contiguous()
        grads = grad.split(splits)
        input_grad = _input_grad(grads, weights) if ctx.needs_input_grad[0] else None
        weight_grads: list[Tensor | None] = [None] * count
        if any(needs_weight):
            uses = _Uses(weights, buffers, needs_weight, ctx.accumulate)
            weight_grads = uses.settle(grads, x.split(splits), plan.store)
        bias_grads = [
            piece.sum(0) if needed else None
            for piece, needed in zip(grads, ctx.needs_input_grad[3 + count :], strict=False)
        ]
        return input_grad, None, None, *weight_grads, *bias_grads


def _input_grad(grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    splits = [piece.shape[0] for piece in grads]
    out = grads[0].new_empty((sum(splits), weights[0].shape[1]))
    for piece, weight, target in zip(grads, weights, out.split(splits), strict=True):
        if piece.shape[0]:
            torch.mm(piece, weight, out=target)
    return out


class _Uses:
    """The weight gradients of one backward of all experts: computed now, or all together by backward_dw()."""

    def __init__(
        self,
        weights: Sequence[Tensor],
        buffers: list[Tensor | None],
        needed: Sequence[bool],
        accumulate: bool,
    ) -> None:
        self.weights, self.buffers, self.needed, self.accumulate = weights, buffers, needed, accumulate

    def settle(
        self, grads: Sequence[Tensor], pieces: Sequence[Tensor], store: wgrad.WeightGradientStore | None
    ) -> list[Tensor | None]:
        """What autograd shall get for each weight."""
        if store is None:
            return self._compute(grads, pieces)

        def compute_later() -> None:
            with torch.no_grad():
                for weight, gradient in zip(self.weights, self._compute(grads, pieces), strict=True):
                    if gradient is not None:
                        wgrad.add_to_grad(weight, gradient)

        store.put(compute_later)
        return [None] * len(self.weights)

    def _compute(self, grads: Sequence[Tensor], pieces: Sequence[Tensor]) -> list[Tensor | None]:
        out: list[Tensor | None] = []
        for grad, piece, buffer, needed in zip(grads, pieces, self.buffers, self.needed, strict=True):
            if not needed:
                out.append(None)
            elif buffer is None:
                out.append(grad.t() @ piece)
            else:
                wgrad.add_weight_gradient(buffer, grad, piece, self.accumulate)
                out.append(None)
        return out


def naive_grouped_linear(
    x: Tensor, splits: Sequence[int], weights: Sequence[Tensor], biases: Sequence[Tensor] | None
) -> Tensor:
    """The oracle: one F.linear per expert, concatenated."""
    pieces = x.split(list(splits))
    made = [
        F.linear(piece, weight, biases[i] if biases else None)
        for i, (piece, weight) in enumerate(zip(pieces, weights, strict=True))
    ]
    return torch.cat(made)
