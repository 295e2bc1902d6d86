"""The entry point: attention over a sequence that is split over context-parallel ranks.

Note [Kinds]
The names are those of --cp-comm-type. All kinds want the zigzag split of balance.py and give the same
numbers: p2p (ring.py), all_gather (all_gather.py), a2a (ulysses.py) and a2a+p2p, an all-to-all within
neighbours and a ring over the rest. After the all-to-all of a neighbours, rank p of the ring holds chunks [p
a, (p + 1) a) and their mirrors, in order: again a zigzag split, over cp / a ranks, so that the ring needs to
know nothing of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.parallel.context.all_gather import AllGatherAttention
from megatron.parallel.context.balance import check_sequence_length
from megatron.parallel.context.documents import Documents
from megatron.parallel.context.local import AttentionKernel, BlockAttention, choose_kernel
from megatron.parallel.context.naive import attention_probabilities, average, document_mask
from megatron.parallel.context.plan import BlockPlan
from megatron.parallel.context.ring import AttentionTask, RingAttention
from megatron.parallel.context.ulysses import check_heads, ulysses_attention

# One group, or for a2a+p2p (group of the all-to-all, group of the ring), as Transformer Engine takes them.
Groups: TypeAlias = dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup] | None


@dataclass(frozen=True)
class _Request:
    """What an attention call asks for, whoever computes it."""

    blocks: BlockAttention
    causal: bool
    documents: Documents | None
    seq_length: int


def _task(request: _Request, group: dist.ProcessGroup | None) -> AttentionTask:
    size, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    plan = BlockPlan(request.seq_length, size, rank, request.causal, request.documents)
    return AttentionTask(request.blocks, plan, group)


def _ring(q: Tensor, k: Tensor, v: Tensor, request: _Request, groups: Groups) -> Tensor:
    assert not isinstance(groups, tuple)
    return RingAttention.apply(q, k, v, _task(request, groups))


def _all_gather(q: Tensor, k: Tensor, v: Tensor, request: _Request, groups: Groups) -> Tensor:
    assert isinstance(groups, dist.ProcessGroup)
    return AllGatherAttention.apply(q, k, v, _task(request, groups))


def _all_to_all(q: Tensor, k: Tensor, v: Tensor, request: _Request, groups: Groups) -> Tensor:
    assert isinstance(groups, dist.ProcessGroup)
    return ulysses_attention(q, k, v, groups, lambda *qkv: RingAttention.apply(*qkv, _task(request, None)))


def _hierarchical(q: Tensor, k: Tensor, v: Tensor, request: _Request, groups: Groups) -> Tensor:
    if not isinstance(groups, tuple) or len(groups) != 2:
        raise ValueError(
            "--cp-comm-type a2a+p2p needs two groups, of the all-to-all and of the ring: give "
            "--hierarchical-context-parallel-sizes, or use --cp-comm-type p2p, a2a or all_gather"
        )
    inner, outer = groups
    return ulysses_attention(q, k, v, inner, lambda *qkv: RingAttention.apply(*qkv, _task(request, outer)))


_KINDS: dict[str, Callable[[Tensor, Tensor, Tensor, _Request, Groups], Tensor]] = {
    "p2p": _ring,
    "all_gather": _all_gather,
    "a2a": _all_to_all,
    "a2a+p2p": _hierarchical,
}
KINDS = tuple(_KINDS)


@dataclass(frozen=True)
class ContextParallelShape:
    """What decides whether a context-parallel run is possible, in the units of the command line.

    Attributes:
        seq_length: --seq-length.
        size: --context-parallel-size.
        kind: --cp-comm-type.
        num_heads: --num-attention-heads over tensor-parallel size.
        num_groups: --num-query-groups over tensor-parallel size, at least 1.
        attention_dropout: --attention-dropout.
        all_to_all_size: the first of --hierarchical-context-parallel-sizes, for a2a+p2p.
    """

    seq_length: int
    size: int
    kind: str
    num_heads: int
    num_groups: int
    attention_dropout: float = 0.0
    all_to_all_size: int | None = None


def check_context_parallel(shape: ContextParallelShape) -> None:
    """Raise ValueError, naming the flag, for what a run cannot do. Call it before anything is built."""
    check_kind(shape.kind)
    check_sequence_length(shape.seq_length, shape.size)
    if shape.size == 1:
        return
    check_dropout(shape.attention_dropout, shape.size)
    if shape.kind == "a2a":
        check_heads(shape.num_heads, shape.num_groups, shape.size)
    if shape.kind == "a2a+p2p":
        inner = shape.all_to_all_size
        if inner is None or inner < 1 or shape.size % inner != 0:
            raise ValueError(
                f"--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes A P with A * P equal to "
                f"--context-parallel-size {shape.size}; the first is {inner}"
            )
        check_heads(shape.num_heads, shape.num_groups, inner)


def check_kind(kind: str) -> None:
    """Raise ValueError for an unknown --cp-comm-type."""
    if kind not in _KINDS:
        raise ValueError(f"--cp-comm-type {kind} is unknown: use one of {', '.join(KINDS)}")


def check_dropout(attention_dropout: float, cp: int) -> None:
    """Raise ValueError for attention dropout under context parallelism."""
    if cp > 1 and attention_dropout != 0.0:
        raise ValueError(
            f"--attention-dropout {attention_dropout} with --context-parallel-size {cp}: dropout of "
            f"probabilities that no rank holds whole is not built; use --attention-dropout 0"
        )


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Groups,
    kind: str = "p2p",
    causal: bool = True,
    softmax_scale: float | None = None,
    document_ids: Documents | Tensor | None = None,
    attention_mask: Tensor | None = None,
    attention_dropout: float = 0.0,
    kernel: AttentionKernel | None = None,
) -> Tensor:
    """Return attention of this rank's rows over the keys of all ranks, with exact gradients.

    Args:
        q: [s_local, b, h, d], the zigzag part of this rank (balance.split), floating point.
        k: [s_local, b, groups, d], groups dividing h.
        v: [s_local, b, groups, v_dim].
        group: context-parallel group; None or a group of one: plain attention of one rank. For a2a+p2p a
            pair.
        kind: one of KINDS; see Note [Kinds].
        causal: hide later positions.
        softmax_scale: factor of the scores, 1 / sqrt(d) if None.
        document_ids: documents that must not see each other, of the WHOLE sequence: `Documents` (made once
            per
            microbatch), or ids [b, s] with s = s_local * cp (copied to the host on every call).
        attention_mask: bool, broadcast to [b, h, s, s], True where hidden. Only without context parallelism.
        attention_dropout: drop probabilities; 0 (also for evaluation) except without context parallelism.
        kernel: the block kernel, the fastest that fits if None.

    Returns:
        [s_local, b, h, v_dim] in q's dtype; bf16 and fp16 are accumulated in float32.

    Raises:
        ValueError: unknown kind, odd local length, heads that cannot be shared out, documents of another
            shape, a dense
            mask or dropout.
    """
    check_kind(kind)
    size = _group_size(group)
    check_dropout(attention_dropout, size)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    request = _make_request(q, k, v, (causal, softmax_scale, kernel), size)
    if document_ids is not None:
        documents = document_ids if isinstance(document_ids, Documents) else Documents.from_ids(document_ids)
        if (documents.batch, documents.length) != (q.size(1), request.seq_length):
            raise ValueError(
                f"document_ids are of {documents.batch} samples of {documents.length} tokens, attention is "
                f"of {q.size(1)} samples of {request.seq_length}: give the ids of the whole sequence, before "
                f"the context-parallel split"
            )
        request = replace(request, documents=documents)
    if attention_mask is not None and size > 1:
        raise ValueError(
            f"a dense attention_mask is not supported with --context-parallel-size {size}: give "
            f"document_ids (--reset-attention-mask) or --context-parallel-size 1"
        )
    if attention_mask is not None or attention_dropout > 0.0:
        return _written_out(q, k, v, request, (attention_mask, attention_dropout))
    return (_ring if size == 1 else _KINDS[kind])(q, k, v, request, None if size == 1 else group)


def _make_request(
    q: Tensor, k: Tensor, v: Tensor, options: tuple[bool, float | None, AttentionKernel | None], size: int
) -> _Request:
    """Check the shapes and put the request together."""
    causal, softmax_scale, kernel = options
    assert q.dim() == k.dim() == v.dim() == 4 and q.size(3) == k.size(3), "q, k, v are [s, b, heads, dim]"
    assert q.shape[:2] == k.shape[:2] == v.shape[:2] and k.size(2) == v.size(2), (
        "q, k, v of one sequence and batch"
    )
    assert q.dtype == k.dtype == v.dtype, f"one dtype for q, k, v: {q.dtype}, {k.dtype}, {v.dtype}"
    check_heads(q.size(2), k.size(2), 1)
    check_sequence_length(q.size(0) * size, size)
    scale = 1.0 / math.sqrt(q.size(3)) if softmax_scale is None else softmax_scale
    return _Request(BlockAttention(kernel or choose_kernel(q, v), scale), causal, None, q.size(0) * size)


def _written_out(
    q: Tensor, k: Tensor, v: Tensor, request: _Request, extras: tuple[Tensor | None, float]
) -> Tensor:
    """Return attention of one rank under any mask and with dropout, on the naive path."""
    mask, dropout = extras
    if request.documents is not None:
        other_document = document_mask(request.documents.ids(q.device))
        mask = other_document if mask is None else mask | other_document
    scale, causal = request.blocks.scale, request.causal
    probabilities = attention_probabilities(q, k, softmax_scale=scale, causal=causal, mask=mask)
    return average(F.dropout(probabilities, dropout) if dropout > 0.0 else probabilities, v)


def _group_size(group: Groups) -> int:
    """Return the number of context-parallel ranks."""
    if group is None:
        return 1
    groups = group if isinstance(group, tuple) else (group,)
    return math.prod(dist.get_world_size(member) for member in groups)
