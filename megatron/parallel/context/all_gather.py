"""All-gather attention (cp_comm_type all_gather): every rank gathers all keys and values, queries stay.

One collective instead of a ring of messages, at the memory of the whole sequence's keys for the time of one
layer (Llama 3 herd of models, section 3.3.2). The backward gathers again instead of keeping them, and
reduce-scatters the gradients of the keys in the accumulation dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.parallel.collectives import launch_all_gather, launch_reduce_scatter
from megatron.parallel.context.local import RowState
from megatron.parallel.context.plan import BlockPlan
from megatron.parallel.context.ring import AttentionTask, Pack, empty_totals, heads_first


class AllGatherAttention(torch.autograd.Function):
    """Attention of [s_local, b, h, d] queries over gathered keys, in the blocks of the ring."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: torch.autograd.function.FunctionCtx, q: Tensor, k: Tensor, v: Tensor, task: AttentionTask
    ) -> Tensor:
        """Return [s_local, b, h, v_dim] in q's dtype."""
        plan, pack = task.plan, Pack(k, v)
        out, totals = empty_totals(q, v)
        gathering = launch_all_gather(pack.join(k, v).unsqueeze(0), task.group)
        # The own keys need not wait.
        own = heads_first(k), heads_first(v)
        task.blocks.forward(plan.block(plan.rank), heads_first(q), own, totals, first=True)
        messages = gathering.wait()
        for source in _others(plan):
            kv = pack.views(messages[source])
            task.blocks.forward(plan.block(source), heads_first(q), kv, totals, first=False)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, totals[1])
        ctx.task = task
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # type: ignore[override]
        ctx: torch.autograd.function.FunctionCtx, grad_out: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        """Return gradients of q, k and v, each summed over all ranks that used it."""
        task: AttentionTask = ctx.task
        q, k, v, out, lse = ctx.saved_tensors
        plan, pack = task.plan, Pack(k, v)
        # Kernels read rows: a gradient that was expanded (of a sum) has none.
        row = RowState(heads_first(q), heads_first(out), lse, heads_first(grad_out.contiguous()))
        grad_q = torch.zeros_like(q, dtype=lse.dtype, memory_format=torch.contiguous_format)
        gathering = launch_all_gather(pack.join(k, v).unsqueeze(0), task.group)
        parts = grad_q.new_zeros(plan.size, pack.numel)
        own = heads_first(k), heads_first(v)
        grads = heads_first(grad_q), *pack.views(parts[plan.rank])
        task.blocks.backward(plan.block(plan.rank), row, own, grads)
        messages = gathering.wait()
        for source in _others(plan):
            grads = heads_first(grad_q), *pack.views(parts[source])
            task.blocks.backward(plan.block(source), row, pack.views(messages[source]), grads)
        summed = launch_reduce_scatter(parts, task.group).wait().view(-1)
        grad_k, grad_v = (x.permute(2, 0, 1, 3) for x in pack.views(summed))
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None


def _others(plan: BlockPlan) -> list[int]:
    """Return the other ranks."""
    return [source for source in range(plan.size) if source != plan.rank]
