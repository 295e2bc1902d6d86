"""The `.grad` of sharded parameters when users clear, replace or keep some of them between backwards."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from megatron.fsdp import ShardingStrategy
from tests.pool import run_ranks
from tests.unit.fsdp.test_wrapper import STRATEGIES, wrap


def change_some(rank, world_size, strategy):
    """Gradients after two backwards, of which the second finds one `.grad` cleared, one replaced, one as it was."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    )
    model = wrap(model.double(), world_size, strategy=ShardingStrategy(strategy))
    x = torch.arange(8.0, dtype=torch.float64).view(2, 4)

    def backward():
        model(x).square().sum().backward()
        model.finish_grad_sync()
        return [parameter.grad for parameter in model.parameters()]

    once = [gradient.full_tensor().clone() for gradient in backward()]
    cleared, replaced, _ = model.parameters()
    cleared.grad = None
    replaced.grad = replaced.grad * 3
    twice = [gradient.full_tensor().clone() for gradient in backward()]
    replaced.grad = replaced.grad * 1  # not the buffer's own
    model.scale_gradients(0.5)
    scaled = [parameter.grad.full_tensor() for parameter in model.parameters()]
    return once, twice, scaled


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_users_did_to_gradients_counts(strategy):
    for once, twice, scaled in run_ranks(change_some, 2, strategy):
        for before, after, half, factor in zip(once, twice, scaled, (1, 4, 2), strict=True):
            torch.testing.assert_close(after, factor * before)
            torch.testing.assert_close(half, factor / 2 * before)


def clear(rank, world_size):
    """Whether the gradient shards are freed by the optimizer's zero_grad."""
    model = wrap(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), world_size)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    model.finish_grad_sync()
    flat = [weakref.ref(group.gradients.grad) for group in model.groups]
    alive = [each() is not None for each in flat]
    optim.zero_grad()
    return alive, [each() is not None for each in flat]


def test_cleared_gradients_are_freed_at_once():
    """Not only when the next forward begins."""
    for before, after in run_ranks(clear, 2):
        assert all(before) and not any(after)
