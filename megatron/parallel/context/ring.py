"""Ring attention (cp_comm_type p2p): keys and values travel around the ranks, queries stay.

Liu et al. 2023, Ring Attention with Blockwise Transformers, arXiv 2310.01889; the zigzag split is
balance.py's.

Note [Ring]
Forward, cp steps: while a rank computes with the keys it has (block of plan.BlockPlan), it sends them to the
next rank and receives those of the previous one. Outputs merge by log-sum-exp. Backward, cp steps: the keys
make the same tour again, which saves keeping cp times as many; the gradients of a rank's keys follow one step
behind them, each rank adds its part in the accumulation dtype (float32 for bf16), and one last hop brings
them home. The hop of the gradients is in flight while the next step computes. Keys and values travel in one
message. With one rank nothing is sent, and this is plain attention with the memory of a tiled kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.parallel.context.local import BlockAttention, RowState, accumulation_dtype
from megatron.parallel.context.plan import BlockPlan
from megatron.parallel.flight import RECORDER

# Keys and their gradients are in flight at once between the same ranks; the tag keeps them apart where the
# backend reads it (gloo). NCCL matches by order, which is the same on all ranks.
_KEYS_TAG, _GRADIENTS_TAG = 0, 1
_LANES = ("keys and values", "their gradients")


@dataclass(frozen=True)
class AttentionTask:
    """What one rank computes and with whom.

    Attributes:
        blocks: kernel and softmax scale.
        plan: which blocks; its size and rank are the group's.
        group: the context-parallel group, None for one rank.
    """

    blocks: BlockAttention
    plan: BlockPlan
    group: dist.ProcessGroup | None


class _Hop:
    """A message to the next rank and one from the previous, in flight until `wait`."""

    def __init__(self, tensor: Tensor, task: AttentionTask, tag: int) -> None:
        size, rank = task.plan.size, task.plan.rank
        self._sent: Tensor | None = tensor
        self._received = torch.empty_like(tensor)
        operations = [
            dist.P2POp(dist.isend, tensor, group=task.group, tag=tag, group_peer=(rank + 1) % size),
            dist.P2POp(dist.irecv, self._received, group=task.group, tag=tag, group_peer=(rank - 1) % size),
        ]
        self._flight = RECORDER.launched("ring hop", task.group, (tensor,), lane=_LANES[tag])
        self._works = dist.batch_isend_irecv(operations)

    def wait(self) -> Tensor:
        """Return what the previous rank sent."""
        RECORDER.waiting(self._flight)
        for work in self._works:
            work.wait()
        RECORDER.ended(self._flight)
        self._sent = None
        return self._received


class Pack:
    """Two tensors in one flat message, with views of it in the shapes of `k` and `v`."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self._shapes, self._sizes = (k.shape, v.shape), (k.numel(), v.numel())

    @property
    def numel(self) -> int:
        """Elements of the message."""
        return sum(self._sizes)

    def join(self, k: Tensor, v: Tensor) -> Tensor:
        """Return a new message that holds both."""
        return torch.cat([k.reshape(-1), v.reshape(-1)])

    def views(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of both in kernel layout [b, groups, s, dim], from messages of [s, b, groups, dim]."""
        k, v = (x.view(shape) for x, shape in zip(message.split(self._sizes), self._shapes, strict=True))
        return heads_first(k), heads_first(v)


def heads_first(tensor: Tensor) -> Tensor:
    """View [s, b, h, d] as [b, h, s, d]."""
    return tensor.permute(1, 2, 0, 3)


def empty_totals(q: Tensor, v: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return unset out [s, b, h, v_dim] and, for the kernels, (its view [b, h, s, v_dim], lse [b, h, s])."""
    dtype = accumulation_dtype(q.dtype)
    out = q.new_empty(*q.shape[:3], v.size(-1), dtype=dtype)
    return out, (heads_first(out), q.new_empty(q.size(1), q.size(2), q.size(0), dtype=dtype))


class RingAttention(torch.autograd.Function):
    """Attention of [s_local, b, h, d] queries over the keys of all ranks of the group; see Note [Ring]."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: torch.autograd.function.FunctionCtx, q: Tensor, k: Tensor, v: Tensor, task: AttentionTask
    ) -> Tensor:
        """Return [s_local, b, h, v_dim] in q's dtype."""
        plan, pack = task.plan, Pack(k, v)
        out, totals = empty_totals(q, v)
        message = pack.join(k, v) if plan.size > 1 else None
        for step in range(plan.size):
            hop = _Hop(message, task, _KEYS_TAG) if message is not None and step + 1 < plan.size else None
            kv = pack.views(message) if message is not None else (heads_first(k), heads_first(v))
            with torch.profiler.record_function(f"context.ring_forward {step}"):
                block = plan.block((plan.rank - step) % plan.size)
                task.blocks.forward(block, heads_first(q), kv, totals, first=step == 0)
            message = hop.wait() if hop is not None else message
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
        # Kernels read rows: a gradient that was expanded (of a sum) has none.
        row = RowState(heads_first(q), heads_first(out), lse, heads_first(grad_out.contiguous()))
        grad_q = torch.zeros_like(q, dtype=lse.dtype, memory_format=torch.contiguous_format)
        if task.plan.size == 1:
            grad_k = torch.zeros_like(k, dtype=lse.dtype, memory_format=torch.contiguous_format)
            grad_v = torch.zeros_like(v, dtype=lse.dtype, memory_format=torch.contiguous_format)
            grads = heads_first(grad_q), heads_first(grad_k), heads_first(grad_v)
            task.blocks.backward(task.plan.block(0), row, (heads_first(k), heads_first(v)), grads)
        else:
            grad_k, grad_v = _ring_backward(task, row, (k, v), heads_first(grad_q))
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None


def _ring_backward(
    task: AttentionTask, row: RowState, kv: tuple[Tensor, Tensor], grad_q: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the tour of the backward: add to `grad_q`, return dk and dv [s_local, b, groups, dim]."""
    plan, pack = task.plan, Pack(*kv)
    message: Tensor = pack.join(*kv)
    gradient_hop: _Hop | None = None
    for step in range(plan.size):
        key_hop = _Hop(message, task, _KEYS_TAG) if step + 1 < plan.size else None
        part = grad_q.new_zeros(pack.numel)
        with torch.profiler.record_function(f"context.ring_backward {step}"):
            block = plan.block((plan.rank - step) % plan.size)
            task.blocks.backward(block, row, pack.views(message), (grad_q, *pack.views(part)))
        if gradient_hop is not None:
            part += gradient_hop.wait()
        # Wait for the keys first: NCCL runs the messages of one group in their order.
        message = key_hop.wait() if key_hop is not None else message
        gradient_hop = _Hop(part, task, _GRADIENTS_TAG)
    assert gradient_hop is not None
    grad_k, grad_v = (x.permute(2, 0, 1, 3) for x in pack.views(gradient_hop.wait()))
    return grad_k, grad_v
