"""Sorting rows by expert, capacity and padding against naive loops. PURE."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.parallel.expert import permute as p
from megatron.parallel.expert.permute import Routing

CASES = st.tuples(st.integers(0, 9), st.integers(1, 6), st.integers(1, 4), st.integers(0, 10_000)).filter(
    lambda case: case[2] <= case[1]
)


def random_routing(num_tokens: int, num_experts: int, topk: int, seed: int) -> Routing:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_tokens, num_experts, generator=generator, dtype=torch.float64)
    best = scores.topk(topk, dim=-1)
    return Routing(best.indices, best.values, num_experts)


def scale(expert: int, rows: torch.Tensor) -> torch.Tensor:
    return rows * (expert + 2)


def experts_on(rows: torch.Tensor, splits: list[int]) -> torch.Tensor:
    return torch.cat([scale(i, piece) for i, piece in enumerate(rows.split(splits))])


@settings(max_examples=30, deadline=None)
@given(CASES)
def test_there_and_back_equals_the_loop(case):
    """Values and gradients of tokens and weights; a token's experts are visited in any order."""
    routing = random_routing(*case)
    tokens = torch.randn(case[0], 3, dtype=torch.float64, requires_grad=True)
    weights = routing.weights.clone().requires_grad_()
    routing = Routing(routing.experts, weights, case[1])
    order = p.expert_order(routing.experts)
    splits = p.tokens_per_expert(routing.experts, case[1]).tolist()
    assert splits == [int((routing.experts == e).sum()) for e in range(case[1])]
    out = p.unpermute(experts_on(p.permute(tokens, order, case[2]), splits), order, weights)
    naive = p.naive_experts(tokens, routing, scale)
    assert torch.allclose(out, naive)
    if not case[0]:
        return
    for ours, theirs in zip(
        torch.autograd.grad(out.square().sum(), (tokens, weights)),
        torch.autograd.grad(naive.square().sum(), (tokens, weights)),
        strict=True,
    ):
        assert torch.allclose(ours, theirs)


@settings(max_examples=30, deadline=None)
@given(CASES, st.integers(1, 5), st.sampled_from(p.DROP_POLICIES))
def test_capacity_keeps_the_best_of_each_expert(case, capacity, policy):
    routing = random_routing(*case)
    kept = p.apply_capacity(routing, capacity, policy, pad=False)
    for expert in range(case[1]):
        entries = [tuple(entry) for entry in (routing.experts == expert).nonzero().tolist()]
        if policy == "probs":
            entries.sort(key=lambda entry: -float(routing.weights[entry]))
        expected = set(entries[:capacity])
        assert {tuple(entry) for entry in (kept.experts == expert).nonzero().tolist()} == expected
    dropped = kept.experts == case[1]
    assert torch.equal(kept.weights[dropped], torch.zeros(int(dropped.sum()), dtype=torch.float64))
    assert torch.equal(kept.weights[~dropped], routing.weights[~dropped])


@settings(max_examples=30, deadline=None)
@given(CASES, st.integers(1, 5))
def test_padded_rows_give_the_same_sums(case, capacity):
    """Every expert gets `capacity` rows; missing ones are zero; dropped entries reach nobody."""
    routing = p.apply_capacity(random_routing(*case), capacity, "probs", pad=True)
    tokens = torch.randn(case[0], 3, dtype=torch.float64, requires_grad=True)
    slot = p.slots(routing)
    rows = p.permute_padded(tokens, slot, case[2], case[1] * capacity)
    assert rows.shape[0] == case[1] * capacity
    out = p.unpermute_padded(experts_on(rows, [capacity] * case[1]), slot, routing.weights)
    naive = p.naive_experts(tokens, routing, scale)
    assert torch.allclose(out, naive)
    if case[0]:
        (ours,) = torch.autograd.grad(out.square().sum(), tokens)
        (theirs,) = torch.autograd.grad(naive.square().sum(), tokens)
        assert torch.allclose(ours, theirs)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_chunks_are_sorted_and_sorted_back(sizes, random):
    order = list(range(len(sizes)))
    random.shuffle(order)
    rows = torch.arange(float(sum(sizes))).unsqueeze(1)
    there = p.sort_chunks(rows, sizes, order)
    back = p.sort_chunks(there, [sizes[i] for i in order], p.inverse_order(order))
    assert torch.equal(back, rows)


@pytest.mark.parametrize(
    ("tokens", "topk", "experts", "factor", "capacity"),
    [(8, 2, 4, 1.0, 4), (7, 2, 4, 1.0, 4), (8, 1, 3, 1.5, 4)],
)
def test_capacity_is_rounded_up(tokens, topk, experts, factor, capacity):
    assert p.expert_capacity(tokens, topk, experts, factor) == capacity
