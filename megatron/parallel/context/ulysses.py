"""Ulysses attention (cp_comm_type a2a): an all-to-all turns sequence shards into head shards, and back.

Jacobs et al. 2023, DeepSpeed Ulysses, arXiv 2309.14509.

Note [Heads of a rank]
Rank r of cp computes query heads [r h/cp, (r+1) h/cp) over the whole sequence. With g key/value groups, head
i reads group i // (h/g). When cp does not divide g, groups are repeated to lcm(g, cp), which divides h
because both g and cp do; then each rank's slice of groups is exactly what its heads read. Repeated groups
cost as many times the bytes of k and v.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.parallel.collectives import all_to_all
from megatron.parallel.context.balance import unsplit

# Attention of the gathered heads: q, k, v [s, b, heads, dim] -> [s, b, heads, v_dim].
Inner = Callable[[Tensor, Tensor, Tensor], Tensor]


def check_heads(num_heads: int, num_groups: int, cp: int) -> None:
    """Raise ValueError unless the heads of one tensor-parallel rank can be shared out over cp ranks.

    Args:
        num_heads: query heads of a tensor-parallel rank.
        num_groups: its key/value groups.
        cp: ranks of the all-to-all.
    """
    if num_groups < 1 or num_heads % num_groups != 0:
        raise ValueError(
            f"--num-attention-heads ({num_heads} per tensor-parallel rank) must be a multiple of "
            f"--num-query-groups ({num_groups} per tensor-parallel rank)"
        )
    if num_heads % cp != 0:
        raise ValueError(
            f"--cp-comm-type a2a shares heads out: --num-attention-heads ({num_heads} per tensor-parallel "
            f"rank) must divide by the all-to-all size {cp} (--context-parallel-size, or the first of "
            f"--hierarchical-context-parallel-sizes); use --cp-comm-type p2p or all_gather, or fewer ranks"
        )


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, inner: Inner) -> Tensor:
    """Run `inner` on a share of the heads over the joined sequence of a group. Differentiable.

    Args:
        q: [s_local, b, h, d], the zigzag part of this rank.
        k: [s_local, b, groups, d].
        v: [s_local, b, groups, v_dim].
        group: the ranks that share heads out.
        inner: attention over [s_local * cp, b, heads, dim]; rows are in global order if the group is all of
            cp.

    Raises:
        ValueError: the heads do not divide by the group's size.
    """
    cp = dist.get_world_size(group)
    check_heads(q.size(2), k.size(2), cp)
    copies = math.lcm(k.size(2), cp) // k.size(2)
    if copies > 1:
        k, v = k.repeat_interleave(copies, dim=2), v.repeat_interleave(copies, dim=2)
    out = inner(*_sequence_to_heads((q, k, v), group, cp))
    return _heads_to_sequence(out, group, cp)


def _sequence_to_heads(tensors: Sequence[Tensor], group: dist.ProcessGroup, cp: int) -> list[Tensor]:
    """Turn [s_local, b, h, d] tensors to [s, b, h / cp, d], in one exchange."""
    # One row per destination: [cp, s_local, b, h / cp, d].
    shares = [x.unflatten(2, (cp, -1)).permute(2, 0, 1, 3, 4) for x in tensors]
    rows = torch.cat([share.reshape(cp, -1) for share in shares], dim=1)
    received = all_to_all(rows, group).split([share[0].numel() for share in shares], dim=1)
    return [unsplit(list(x.reshape(share.shape)), 0) for x, share in zip(received, shares, strict=True)]


def _heads_to_sequence(out: Tensor, group: dist.ProcessGroup, cp: int) -> Tensor:
    """Turn [s, b, h / cp, d] to [s_local, b, h, d]: the inverse of `_sequence_to_heads`."""
    chunks = out.chunk(2 * cp, dim=0)
    parts = torch.stack([torch.cat([chunks[rank], chunks[2 * cp - 1 - rank]]) for rank in range(cp)])
    received = all_to_all(parts.flatten(1), group).view(parts.shape)
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)
