"""Zigzag split: a permutation, balanced, invertible, and loud about lengths that do not fit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.parallel.context.balance import (
    check_sequence_length,
    split,
    split_batch,
    unsplit,
    zigzag_indices,
    zigzag_ranges,
)

sizes = st.integers(1, 9)
chunks = st.integers(1, 7)


@given(cp=sizes, chunk=chunks)
@settings(deadline=None)
def test_indices_are_a_permutation_in_ascending_local_order(cp: int, chunk: int) -> None:
    seq = 2 * cp * chunk
    parts = [zigzag_indices(seq, cp, rank) for rank in range(cp)]
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(seq))
    for part in parts:
        assert part.numel() == seq // cp
        assert bool((part[1:] > part[:-1]).all())


@given(cp=sizes, chunk=chunks)
@settings(deadline=None)
def test_causal_work_is_the_same_on_all_ranks(cp: int, chunk: int) -> None:
    seq = 2 * cp * chunk
    work = {int((zigzag_indices(seq, cp, rank) + 1).sum()) for rank in range(cp)}
    assert work == {seq * (seq + 1) // 2 // cp}


def test_known_split() -> None:
    assert zigzag_indices(16, 2, 0).tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert zigzag_indices(16, 2, 1).tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    assert zigzag_ranges(16, 4, 1) == ((2, 4), (12, 14))


@given(cp=sizes, chunk=chunks, dim=st.integers(0, 2))
@settings(max_examples=40, deadline=None)
def test_split_picks_the_indices_and_unsplit_inverts_it(cp: int, chunk: int, dim: int) -> None:
    seq = 2 * cp * chunk
    shape = [2, 3, 4]
    shape[dim] = seq
    whole = torch.randn(shape)
    parts = [split(whole, dim, cp, rank) for rank in range(cp)]
    for rank, part in enumerate(parts):
        assert torch.equal(part, whole.index_select(dim, zigzag_indices(seq, cp, rank)))
    assert torch.equal(unsplit(parts, dim), whole)


def test_split_is_differentiable() -> None:
    whole = torch.randn(8, 3, requires_grad=True)
    loss = sum((rank + 1) * split(whole, 0, 2, rank).sum() for rank in range(2))
    (grad,) = torch.autograd.grad(loss, whole)
    assert grad[:, 0].tolist() == [1, 1, 2, 2, 2, 2, 1, 1]


@pytest.mark.parametrize(("seq", "cp"), [(10, 2), (7, 2), (8, 3), (2, 2), (1, 4), (0, 2)])
def test_lengths_that_do_not_divide_name_flags_and_a_fix(seq: int, cp: int) -> None:
    with pytest.raises(
        ValueError, match=r"--seq-length \d+ .*--context-parallel-size \(\d+\).*use --seq-length"
    ) as error:
        split(torch.zeros(seq, 1), 0, cp, 0)
    suggestion = int(str(error.value).split("use --seq-length ")[1].split()[0])
    check_sequence_length(suggestion, cp)


def test_one_rank_takes_any_length() -> None:
    whole = torch.arange(7)
    assert split(whole, 0, 1, 0) is whole
    assert zigzag_indices(7, 1, 0).tolist() == list(range(7))


def test_a_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="--context-parallel-size is 0"):
        check_sequence_length(8, 0)


def test_split_batch_splits_what_has_a_sequence_and_keeps_the_rest_whole() -> None:
    seq, cp = 8, 2
    tokens = torch.arange(2 * seq).view(2, seq)
    batch = {
        "tokens": tokens,
        "labels": tokens + 1,
        "loss_mask": torch.ones(2, seq),
        "position_ids": torch.arange(seq).expand(2, -1),
        "attention_mask": torch.arange(seq * seq).view(1, 1, seq, seq),
        "document_ids": torch.zeros(2, seq),
        "cu_seqlens": None,
    }
    for rank in range(cp):
        index = zigzag_indices(seq, cp, rank)
        local = split_batch(batch, cp, rank)
        assert set(local) == set(batch)
        assert torch.equal(local["tokens"], tokens[:, index])
        assert torch.equal(local["labels"], tokens[:, index] + 1)
        assert torch.equal(local["position_ids"], index.expand(2, -1))
        assert torch.equal(local["attention_mask"], batch["attention_mask"][:, :, index])
        assert local["loss_mask"].shape == (2, seq // cp)
        assert local["document_ids"] is batch["document_ids"]
        assert local["cu_seqlens"] is None
