"""The shift of a split sequence equals the split of the shifted one, as multi-token prediction needs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron.parallel.context.balance import split
from megatron.parallel.context.roll import roll_left
from tests.pool import run_ranks


def naive_roll(tensor: torch.Tensor, dim: int, fill: float) -> torch.Tensor:
    rest = tensor.narrow(dim, 1, tensor.size(dim) - 1)
    return torch.cat([rest, torch.full_like(tensor.narrow(dim, 0, 1), fill)], dim)


def roll_worker(rank: int, world_size: int) -> None:
    for chunk in (1, 2, 3):
        for dim, shape in ((1, (2, 2 * world_size * chunk)), (0, (2 * world_size * chunk, 2, 3))):
            for dtype in (torch.int64, torch.float32):
                whole = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype) + 1
                local = split(whole, dim, world_size, rank).clone()
                for _ in range(3):  # the depths of multi-token prediction
                    before = local.clone()
                    rolled = roll_left(local, dim, dist.group.WORLD, fill=0)
                    assert torch.equal(local, before)
                    whole = naive_roll(whole, dim, 0)
                    assert torch.equal(rolled, split(whole, dim, world_size, rank)), (chunk, dim, dtype)
                    local = rolled


@pytest.mark.parametrize("size", [1, 2, 4])
def test_roll_of_parts_equals_parts_of_the_roll(size: int) -> None:
    run_ranks(roll_worker, size)


def test_one_rank_and_fill() -> None:
    assert roll_left(torch.tensor([[1, 2, 3]]), 1, None, fill=-1).tolist() == [[2, 3, -1]]
