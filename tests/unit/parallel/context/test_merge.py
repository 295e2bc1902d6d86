"""Merging by log-sum-exp equals one softmax over all keys, whatever the split."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.parallel.context.merge import merge, merge_into


def part(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of rows over some keys in one shot; rows whose scores are all -inf (or none) see nothing."""
    if scores.size(-1) == 0:
        return torch.zeros(scores.size(0), values.size(1)).double(), torch.full(
            (scores.size(0),), float("-inf")
        ).double()
    lse = scores.logsumexp(-1)
    return scores.softmax(-1).nan_to_num(0.0) @ values, lse


@st.composite
def problems(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Draw scores [rows, keys] of any size with hidden keys, values, and cuts of the keys."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rows, keys = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    spread = draw(st.sampled_from([1e-3, 1.0, 30.0, 1e3, 1e5]))
    scores = torch.randn(rows, keys, generator=generator, dtype=torch.float64) * spread
    hidden = torch.rand(rows, keys, generator=generator) < draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))
    cuts = sorted(draw(st.lists(st.integers(0, keys), max_size=4)))
    values = torch.randn(keys, 3, generator=generator, dtype=torch.float64)
    return scores.masked_fill(hidden, float("-inf")), values, [0, *cuts, keys]


@given(problem=problems(), order=st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_any_split_in_any_order_equals_one_shot(problem: tuple, order: object) -> None:
    scores, values, cuts = problem
    spans = list(pairwise(cuts))
    order.shuffle(spans)  # type: ignore[attr-defined]
    parts = [part(scores[:, a:b], values[a:b]) for a, b in spans]
    wanted_out, wanted_lse = part(scores, values)
    out, lse = parts[0]
    in_place = parts[0][0].clone(), parts[0][1].clone()
    for other_out, other_lse in parts[1:]:
        out, lse = merge(out, lse, other_out, other_lse)
        merge_into(*in_place, other_out.clone(), other_lse)
    assert torch.allclose(out, wanted_out, rtol=1e-12, atol=1e-12)
    assert torch.allclose(lse, wanted_lse, rtol=1e-12, atol=1e-12)
    assert torch.allclose(in_place[0], out, rtol=1e-14, atol=1e-14)
    assert torch.equal(in_place[1], lse)


def test_rows_without_keys_are_neutral_and_finite() -> None:
    nothing = torch.zeros(2, 3), torch.full((2,), float("-inf"))
    something = torch.randn(2, 3), torch.tensor([1.0, -500.0])
    for a, b in ((nothing, something), (something, nothing)):
        out, lse = merge(*a, *b)
        assert torch.equal(out, something[0])
        assert torch.equal(lse, something[1])
    out, lse = merge(*nothing, *nothing)
    assert torch.equal(out, nothing[0])
    assert torch.equal(lse, nothing[1])


def test_huge_scores_do_not_overflow_in_float32() -> None:
    out, lse = merge(torch.ones(1, 2), torch.tensor([3e38]), torch.zeros(1, 2), torch.tensor([-3e38]))
    assert out.tolist() == [[1.0, 1.0]]
    assert lse.tolist() == [float(torch.tensor(3e38))]


def test_merge_into_writes_views() -> None:
    out, lse = torch.zeros(4, 3), torch.full((4,), float("-inf"))
    merge_into(out[2:], lse[2:], torch.ones(2, 3), torch.zeros(2))
    assert out[:, 0].tolist() == [0, 0, 1, 1]
    assert lse[2:].tolist() == [0, 0]
