"""The exchange of sequence shares for head shares: which rows and heads a rank sees, and the way back."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron.parallel.context.balance import split
from megatron.parallel.context.ulysses import check_heads, ulysses_attention
from tests.pool import run_ranks


def exchange_worker(rank: int, world_size: int, groups: int) -> None:
    """Mark every element with its position and head, and look at what the inner attention gets."""
    seq, heads = 4 * world_size, 8
    marks = (torch.arange(seq).view(-1, 1, 1, 1) * 100 + torch.arange(heads).view(1, 1, -1, 1)).float()
    q = split(marks, 0, world_size, rank).requires_grad_()
    k = split(marks[:, :, :groups], 0, world_size, rank)
    seen: list[torch.Tensor] = []

    def inner(q_: torch.Tensor, k_: torch.Tensor, v_: torch.Tensor) -> torch.Tensor:
        seen.extend([q_, k_, v_])
        return q_ * 2

    out = ulysses_attention(q, k, k + 0.5, dist.group.WORLD, inner)
    share = heads // world_size
    mine = range(rank * share, (rank + 1) * share)
    assert torch.equal(seen[0], marks[:, :, list(mine)])
    # The inner attention maps its heads evenly to its groups, whatever was repeated.
    local_groups = seen[1].size(2)
    for position, head in enumerate(mine):
        group = head // (heads // groups)
        got = seen[1][:, 0, position // (share // local_groups), 0]
        assert torch.equal(got, marks[:, 0, group, 0]), (head, group)
    assert torch.equal(seen[2], seen[1] + 0.5)
    assert torch.equal(out, q * 2)
    (grad,) = torch.autograd.grad((out * q.detach()).sum(), q)
    assert torch.equal(grad, 2 * q)


@pytest.mark.parametrize(("size", "groups"), [(2, 8), (2, 1), (4, 4), (4, 2), (4, 1), (1, 2)])
def test_each_rank_sees_its_heads_over_the_whole_sequence(size: int, groups: int) -> None:
    run_ranks(exchange_worker, size, groups)


def test_heads_that_do_not_divide_are_named() -> None:
    check_heads(8, 2, 4)
    with pytest.raises(ValueError, match=r"--num-attention-heads \(6 .*must divide by the all-to-all size 4"):
        check_heads(6, 2, 4)
    with pytest.raises(ValueError, match=r"--num-attention-heads \(8 .*multiple of --num-query-groups \(3 "):
        check_heads(8, 3, 2)
