"""Attention kernels of one device, and blocks of attention in terms of them. No communication.

Note [Kernels]
Kernels work on [batch, heads, rows, head_dim] (any strides), with fewer key/value heads than query heads
allowed (grouped queries), and give the log-sum-exp that merging needs. The backward takes the output and
log-sum-exp of the WHOLE row, over all keys of all blocks: with P = exp(scale * q k - lse) and D =
sum(grad_out * out), a block's gradients are dV = P^T dO, dS = P * (dO V^T - D), dQ = scale * dS K, dK = scale
* dS^T Q, and simply add up (FlashAttention, algorithm 4). `MathKernel` is the oracle of the others, and the
fallback where no fast kernel fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.parallel.context.merge import merge_into
from megatron.parallel.context.plan import Block


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which attention is summed: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class AttentionKernel(Protocol):
    """Attention of a dense block; see Note [Kernels]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        """Return out [b, h, rows, v_dim] and lse [b, h, rows] in the accumulation dtype."""
        ...

    def backward(
        self, row: RowState, k: Tensor, v: Tensor, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv) of this block in any floating dtype."""
        ...


@dataclass(frozen=True)
class RowState:
    """What a backward knows of its rows: q, out, grad_out [b, h, rows, dim], lse [b, h, rows] of all keys."""

    q: Tensor
    out: Tensor
    lse: Tensor
    grad_out: Tensor

    def narrow(self, sample: slice, rows: slice) -> RowState:
        """Return the same for some samples and rows (views)."""
        return RowState(
            self.q[sample, :, rows],
            self.out[sample, :, rows],
            self.lse[sample, :, rows],
            self.grad_out[sample, :, rows],
        )


class MathKernel:
    """Scores, softmax and products written out; memory is batch x heads x rows x keys."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        """See AttentionKernel."""
        scores = self._scores(q, k, scale, causal)
        lse = scores.logsumexp(dim=-1)
        out = (scores - lse.unsqueeze(-1)).exp() @ v.to(scores.dtype).unsqueeze(2)
        return out.flatten(1, 2), lse.flatten(1, 2)

    def backward(
        self, row: RowState, k: Tensor, v: Tensor, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See AttentionKernel."""
        scores = self._scores(row.q, k, scale, causal)
        dtype, groups = scores.dtype, k.size(1)
        grad_out = row.grad_out.to(dtype)
        delta = (grad_out * row.out.to(dtype)).sum(dim=-1, keepdim=True).unflatten(1, (groups, -1))
        grad_out = grad_out.unflatten(1, (groups, -1))
        probabilities = (scores - row.lse.unflatten(1, (groups, -1)).unsqueeze(-1)).exp()
        grad_v = (probabilities.transpose(-1, -2) @ grad_out).sum(dim=2)
        grad_scores = probabilities * (grad_out @ v.to(dtype).unsqueeze(2).transpose(-1, -2) - delta) * scale
        grad_q = (grad_scores @ k.to(dtype).unsqueeze(2)).flatten(1, 2)
        grad_k = (grad_scores.transpose(-1, -2) @ row.q.to(dtype).unflatten(1, (groups, -1))).sum(dim=2)
        return grad_q, grad_k, grad_v

    @staticmethod
    def _scores(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
        """Return scaled scores [b, groups, heads per group, rows, keys]."""
        dtype = accumulation_dtype(q.dtype)
        scores = (q.to(dtype) * scale).unflatten(1, (k.size(1), -1)) @ k.to(dtype).unsqueeze(2).transpose(
            -1, -2
        )
        if causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(hidden, float("-inf"))
        return scores


class CpuFlashKernel:
    """torch's tiled CPU kernel in float32 or float64: its bf16 backward is ten times slower than a cast."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        """See AttentionKernel."""
        width, dtype = max(q.size(-1), v.size(-1)), accumulation_dtype(q.dtype)
        q_, k_, v_ = (_widen(x.to(dtype), width) for x in (q, k, v))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_, k_, v_, 0.0, causal, scale=scale
        )
        return out[..., : v.size(-1)], lse

    def backward(
        self, row: RowState, k: Tensor, v: Tensor, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See AttentionKernel."""
        qk_dim, v_dim = k.size(-1), v.size(-1)
        width, dtype = max(qk_dim, v_dim), accumulation_dtype(k.dtype)
        q_, k_, v_, out, grad_out = (_widen(x.to(dtype), width) for x in (row.q, k, v, row.out, row.grad_out))
        grad_q, grad_k, grad_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, q_, k_, v_, out, row.lse, 0.0, causal, scale=scale
        )
        return grad_q[..., :qk_dim], grad_k[..., :qk_dim], grad_v[..., :v_dim]


class CudaFlashKernel:
    """torch's FlashAttention kernel: bf16 or fp16, head dims up to 256."""

    max_head_dim = 256

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        """See AttentionKernel."""
        width = self._width(k, v)
        q_, k_, v_ = (_widen(x, width) for x in (q, k, v))
        result = torch.ops.aten._scaled_dot_product_flash_attention(
            q_, k_, v_, 0.0, causal, False, scale=scale
        )
        return result[0].narrow(-1, 0, v.size(-1)).float(), result[1]

    def backward(
        self, row: RowState, k: Tensor, v: Tensor, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See AttentionKernel."""
        qk_dim, v_dim, width = k.size(-1), v.size(-1), self._width(k, v)
        q_, k_, v_, out, grad_out = (_widen(x, width) for x in (row.q, k, v, row.out, row.grad_out))
        # Dropout is off, so the kernel never reads the state of its random stream; it only wants such
        # tensors.
        seed, offset = (torch.zeros(shape, dtype=torch.uint64, device=k.device) for shape in ((2,), ()))
        grad_q, grad_k, grad_v = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad_out, q_, k_, v_, out, row.lse.contiguous(), None, None, q_.size(2), k_.size(2),
            0.0, causal, seed, offset, scale=scale,
        )  # fmt: skip
        return grad_q.narrow(-1, 0, qk_dim), grad_k.narrow(-1, 0, qk_dim), grad_v.narrow(-1, 0, v_dim)

    @staticmethod
    def _width(k: Tensor, v: Tensor) -> int:
        """Return the head dim that the kernel sees: a multiple of 8."""
        return -(-max(k.size(-1), v.size(-1)) // 8) * 8


def choose_kernel(q: Tensor, v: Tensor) -> AttentionKernel:
    """Return the fastest kernel that fits the device, dtype and head dims of these tensors."""
    if q.device.type == "cpu" and q.dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        return CpuFlashKernel()
    fits = (
        q.dtype in (torch.bfloat16, torch.float16)
        and max(q.size(-1), v.size(-1)) <= CudaFlashKernel.max_head_dim
    )
    return CudaFlashKernel() if q.device.type == "cuda" and fits else MathKernel()


@dataclass(frozen=True)
class BlockAttention:
    """Attention of blocks (plan.Block) with one kernel and softmax scale, summed over the blocks of a row."""

    kernel: AttentionKernel
    scale: float

    def forward(
        self, block: Block, q: Tensor, kv: tuple[Tensor, Tensor], total: tuple[Tensor, Tensor], first: bool
    ) -> None:
        """Merge one block into `total`.

        Args:
            block: which rows and keys.
            q: all local queries [b, h, s_local, d].
            kv: keys and values at hand, [b, groups, s_local, dim] each.
            total: out [b, h, s_local, v_dim] and lse [b, h, s_local] so far, written in place.
            first: `total` is still unset; this block must be the diagonal one, which reaches every row.
        """
        out, lse = total
        for sample, rows, keys in _pieces(block):
            k, v = (x[sample, :, keys] for x in kv)
            piece, piece_lse = self.kernel.forward(q[sample, :, rows], k, v, self.scale, block.causal)
            if first:
                out[sample, :, rows] = piece
                lse[sample, :, rows] = piece_lse
            else:
                merge_into(out[sample, :, rows], lse[sample, :, rows], piece, piece_lse)

    def backward(
        self, block: Block, row: RowState, kv: tuple[Tensor, Tensor], grads: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        """Add one block's gradients to `grads`: dq [b, h, s_local, d], dk and dv like `kv`, in place."""
        for sample, rows, keys in _pieces(block):
            k, v = (x[sample, :, keys] for x in kv)
            parts = self.kernel.backward(row.narrow(sample, rows), k, v, self.scale, block.causal)
            grads[0][sample, :, rows] += parts[0]
            grads[1][sample, :, keys] += parts[1]
            grads[2][sample, :, keys] += parts[2]


def _pieces(block: Block) -> Iterator[tuple[slice, slice, slice]]:
    """Yield (samples, query rows, key rows) of the dense pieces of a block, in local rows."""
    if block.segments is None:
        yield slice(None), slice(*block.queries), slice(*block.keys)
        return
    query_start, key_start = block.queries[0], block.keys[0]
    for segment in block.segments:
        rows = slice(query_start + segment.queries[0], query_start + segment.queries[1])
        keys = slice(key_start + segment.keys[0], key_start + segment.keys[1])
        yield slice(segment.sample, segment.sample + 1), rows, keys


def _widen(tensor: Tensor, width: int) -> Tensor:
    """Pad the head dim with zeros, which change no score, for kernels that want one width."""
    return tensor if tensor.size(-1) == width else F.pad(tensor, (0, width - tensor.size(-1)))
