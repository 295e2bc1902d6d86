"""Cross-entropy over a vocabulary that is cut over the tensor-parallel ranks.

Note "Vocabulary": each rank has the logits of `V / size` columns, by rank, of which the last ones may be
padding; only its first `num_real` columns take part in the softmax. Each rank sums its own exponentials; two
small all-reduces (maximum, then scaled sums with the label's logit) give every rank the loss of the whole
vocabulary.

Note "Chunks": rows are worked off in chunks, so that what exists in fp32 at any time is a chunk of rows. The
logits of `vocab_parallel_cross_entropy` stay as they came, in the compute dtype; `linear_cross_entropy` never
has more than a chunk of them in any dtype, and pays with one more GEMM in backward, unless they are a small chunk
anyway, which it keeps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.parallel import wgrad
from megatron.parallel.collectives import launch_all_gather, launch_all_reduce, launch_reduce_scatter
from megatron.parallel.tensor import LinearPlan, rows

CHUNK_ELEMENTS = 1 << 21
"""Logits in a chunk (8 MB in fp32)."""

LINEAR_CHUNK_ELEMENTS = 1 << 23
"""The same for linear_cross_entropy, which reads and writes the whole weight gradient once per chunk: fewer, larger."""

LINEAR_CHUNK_ROWS = 512
"""Rows at least, of its chunks: with fewer a GPU's GEMMs wait for the weight, not for their products."""


def naive_cross_entropy(logits: Tensor, labels: Tensor, vocab_size: int | None = None) -> Tensor:
    """The oracle: fp32 loss [...] of whole logits [..., V] against labels [...]."""
    logits = logits.float() if logits.dtype != torch.float64 else logits
    logits = logits[..., :vocab_size]
    return logits.logsumexp(-1) - logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, group: ProcessGroup | None = None, num_real: int | None = None
) -> Tensor:
    """Loss of each token from this rank's columns of the logits.

    Args:
        logits: [..., V / size], this rank's columns, any floating dtype.
        labels: [...], global word indices, the same on every rank.
        group: tensor-parallel group, None at size 1.
        num_real: how many of this rank's columns are no padding; None: all.

    Returns [...] in fp32 (float64 for float64 logits), the same on every rank. A label outside the vocabulary
    contributes no logit of its own: mask its loss.
    """
    return _CrossEntropy.apply(logits, labels, group, num_real)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, plan: LinearPlan, num_real: int | None = None
) -> Tensor:
    """Loss of each token from the hidden states before the head; logits never exist as a whole (note
    "Chunks").

    Args:
        hidden: [s, b, h], with `plan.gather_input` this rank's piece [s / size, b, h].
        weight: [V / size, h], the head's.
        labels: [s, b].
        plan: of the head, a column-cut linear: group, sequence parallelism, fused wgrad (never delayed here).
        num_real: how many of this rank's rows of `weight` are no padding; None: all.

    Returns [s, b] as `vocab_parallel_cross_entropy`.
    """
    return _LinearCrossEntropy.apply(hidden, weight, labels, plan, num_real)


def _chunks(num_rows: int, num_columns: int, elements: int, least: int = 16) -> Iterator[slice]:
    step = max(least, elements // max(1, num_columns))
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def _linear_chunks(x: Tensor, weight: Tensor) -> list[slice]:
    return list(_chunks(x.shape[0], weight.shape[0], LINEAR_CHUNK_ELEMENTS, LINEAR_CHUNK_ROWS))


def _precise(logits: Tensor, num_real: int) -> Tensor:
    """A chunk of logits in the dtype of the loss, without padding columns; may be `logits` itself."""
    return logits[:, :num_real].to(torch.promote_types(logits.dtype, torch.float32))


class _Statistics:
    """Per row: maximum, sum of exponentials and the label's logit, of this rank's columns, then of all."""

    def __init__(
        self, labels: Tensor, columns: tuple[int, int | None], group: ProcessGroup | None, dtype: torch.dtype
    ) -> None:
        num_local, num_real = columns
        self.num_real = num_local if num_real is None else num_real
        self.group = group
        local = labels.reshape(-1) - (0 if group is None else group.rank() * num_local)
        self.mine = (local >= 0) & (local < self.num_real)
        self.columns = local.clamp_(0, max(0, self.num_real - 1))
        precise = torch.promote_types(dtype, torch.float32)
        self.maximum = torch.full(local.shape, -torch.inf, dtype=precise, device=labels.device)
        self.sums = torch.zeros(2, *local.shape, dtype=precise, device=labels.device)

    def add(self, chunk: slice, logits: Tensor) -> None:
        """Take in a chunk of logits [rows, V / size]."""
        if self.num_real == 0:
            return
        logits = _precise(logits, self.num_real)
        maximum = logits.amax(-1)
        self.maximum[chunk] = maximum
        picked = logits.gather(-1, self.columns[chunk, None]).squeeze(-1)
        self.sums[1, chunk] = torch.where(self.mine[chunk], picked, 0.0)
        self.sums[0, chunk] = (logits - maximum.unsqueeze(-1)).exp_().sum(-1)

    def finish(self) -> tuple[Tensor, Tensor]:
        """(loss, log of the sum of exponentials) of every row, over all ranks' columns."""
        largest = self.maximum
        if self.group is not None:
            largest = launch_all_reduce(self.maximum.clone(), self.group, dist.ReduceOp.MAX).wait()
            self.sums[0] *= (self.maximum - largest).exp_()
            launch_all_reduce(self.sums, self.group).wait()
        log_sum = self.sums[0].log() + largest
        return log_sum - self.sums[1], log_sum

    def gradient(self, chunk: slice, logits: Tensor, log_sum: Tensor, grad: Tensor) -> Tensor:
        """(softmax - one-hot) * grad [rows] of a chunk: its part of d loss / d logits, in their dtype."""
        out = logits.new_zeros(logits.shape)
        if self.num_real == 0:
            return out
        softmax = (_precise(logits, self.num_real) - log_sum[chunk, None]).exp_()
        hit = self.mine[chunk, None].to(softmax.dtype).neg_()
        softmax.scatter_add_(1, self.columns[chunk, None], hit)
        out[:, : self.num_real] = softmax.mul_(grad[chunk, None])
        return out


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, group: ProcessGroup | None, num_real: int | None
    ) -> Tensor:
        flat = logits.reshape(-1, logits.shape[-1])
        statistics = _Statistics(labels, (flat.shape[1], num_real), group, logits.dtype)
        for chunk in _chunks(flat.shape[0], flat.shape[1], CHUNK_ELEMENTS):
            statistics.add(chunk, flat[chunk])
        loss, log_sum = statistics.finish()
        ctx.statistics, ctx.shape = statistics, logits.shape
        ctx.save_for_backward(logits, log_sum)
        return loss.view(labels.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, log_sum = ctx.saved_tensors
        flat = logits.reshape(-1, ctx.shape[-1])
        out = torch.empty_like(flat)
        for chunk in _chunks(flat.shape[0], flat.shape[1], CHUNK_ELEMENTS):
            out[chunk] = ctx.statistics.gradient(chunk, flat[chunk], log_sum, grad.reshape(-1))
        return out.view(ctx.shape), None, None, None


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, plan: LinearPlan, num_real: int | None
    ) -> Tensor:
        whole = launch_all_gather(hidden, plan.group).wait() if plan.gather_input else hidden
        x = rows(whole)
        statistics = _Statistics(labels, (weight.shape[0], num_real), plan.group, hidden.dtype)
        chunks = _linear_chunks(x, weight)
        logits: Tensor | None = None
        for chunk in chunks:
            logits = x[chunk] @ weight.t()
            statistics.add(chunk, logits)
        if len(chunks) > 1 or (logits is not None and logits.numel() > LINEAR_CHUNK_ELEMENTS):
            logits = None
        loss, log_sum = statistics.finish()
        ctx.statistics, ctx.plan, ctx.weight = statistics, plan, weight
        ctx.accumulate = plan.fused and wgrad.accumulates(weight)
        ctx.save_for_backward(hidden, log_sum, logits)
        return loss.view(labels.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, log_sum, kept = ctx.saved_tensors
        plan, weight, statistics = ctx.plan, ctx.weight, ctx.statistics
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        fused = wgrad.fetch_main_grad(weight) if plan.fused and needs_weight else None
        x = rows(launch_all_gather(hidden, plan.group).wait() if plan.gather_input else hidden)
        hidden_grad = torch.empty_like(x) if needs_hidden else None
        chunks = _linear_chunks(x, weight)
        # Chunks of an unfused gradient are summed in fp32, whatever the weight's dtype.
        alone = needs_weight and fused is None and len(chunks) == 1
        unfused: Tensor | None = None
        if needs_weight and fused is None and not alone:
            unfused = weight.new_zeros(weight.shape, dtype=log_sum.dtype)
        accumulate = ctx.accumulate or fused is None
        buffer = unfused if fused is None else fused
        for chunk in chunks:
            logits = x[chunk] @ weight.t() if kept is None else kept
            logits_grad = statistics.gradient(chunk, logits, log_sum, grad.reshape(-1))
            if hidden_grad is not None:
                torch.mm(logits_grad, weight, out=hidden_grad[chunk])
            if buffer is not None:
                wgrad.add_weight_gradient(buffer, logits_grad, x[chunk], accumulate)
                accumulate = True
            if alone:
                unfused = logits_grad.t() @ x
        weight_grad = None if unfused is None else unfused.to(weight.dtype)
        return _finish_hidden_grad(hidden_grad, hidden.shape, plan), weight_grad, None, None, None


def _finish_hidden_grad(grad: Tensor | None, shape: torch.Size, plan: LinearPlan) -> Tensor | None:
    if grad is None or plan.group is None:
        return None if grad is None else grad.view(shape)
    if plan.gather_input:
        return launch_reduce_scatter(grad.view(-1, *shape[1:]), plan.group).wait()
    return launch_all_reduce(grad.view(shape), plan.group).wait()
