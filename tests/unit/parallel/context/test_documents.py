"""Document boundaries: Megatron's end-of-document rules, and what of them a rank holds."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.parallel.context.balance import zigzag_indices, zigzag_ranges
from megatron.parallel.context.documents import Documents, document_ids_from_tokens


def naive_megatron_masks(tokens: list[int], eod: int) -> tuple[list[int], torch.Tensor]:
    """Positions and allowed pairs of one sample, by Megatron's loop over end tokens."""
    seq = len(tokens)
    allowed = torch.ones(seq, seq, dtype=torch.bool).tril()
    positions = torch.arange(seq)
    previous = 0
    for i in [i for i, token in enumerate(tokens) if token == eod]:
        allowed[i + 1 :, : i + 1] = False
        positions[i + 1 :] -= i + 1 - previous
        previous = i + 1
    return positions.tolist(), allowed


@given(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=24))
@settings(deadline=None)
def test_end_tokens_end_documents_as_in_megatron(tokens: list[int]) -> None:
    """D11: positions and masks reset after an end-of-document token, which belongs to its document."""
    documents = Documents.from_tokens(torch.tensor([tokens]), eod=0)
    positions, allowed = naive_megatron_masks(tokens, 0)
    assert documents.position_ids()[0].tolist() == positions
    ids = documents.ids()[0]
    assert torch.equal((ids[:, None] == ids[None]).tril(), allowed)


def test_ids_round_trip_over_a_batch() -> None:
    ids = torch.tensor([[5, 5, 5, 7, 7, 2], [0, 1, 2, 3, 4, 5]])
    documents = Documents.from_ids(ids)
    assert documents.starts == ((0, 3, 5), (0, 1, 2, 3, 4, 5))
    assert documents.ids().tolist() == [[0, 0, 0, 1, 1, 2], [0, 1, 2, 3, 4, 5]]
    assert Documents.from_ids(documents.ids()) == documents


def test_cumulative_lengths() -> None:
    assert Documents.from_cu_seqlens(torch.tensor([0, 3, 3, 7])) == Documents(((0, 3),), 7)
    assert Documents.from_cu_seqlens([0, 4, 4]) == Documents(((0,),), 4)


@pytest.mark.parametrize("bad", [[], [0], [1, 4], [0, 4, 3]])
def test_bad_cumulative_lengths_are_refused(bad: list[int]) -> None:
    with pytest.raises(ValueError, match="cu_seqlens"):
        Documents.from_cu_seqlens(bad)


@pytest.mark.parametrize("starts", [(), (1,), (0, 3, 2), (0, 8)])
def test_bad_starts_are_refused(starts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="document starts"):
        Documents((starts,), 8)


def test_scattered_documents_are_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        Documents.from_ids(torch.tensor([[0, 1, 0]]))


@given(
    cp=st.integers(1, 4),
    chunk=st.integers(1, 4),
    cuts=st.sets(st.integers(1, 31), max_size=6),
    data=st.data(),
)
@settings(deadline=None)
def test_offsets_bound_each_document_among_local_rows(
    cp: int, chunk: int, cuts: set[int], data: st.DataObject
) -> None:
    seq = 2 * cp * chunk
    documents = Documents(((0, *sorted(c for c in cuts if c < seq)),), seq)
    rank = data.draw(st.integers(0, cp - 1))
    local_ids = documents.ids()[0, zigzag_indices(seq, cp, rank)]
    offsets = documents.offsets(0, zigzag_ranges(seq, cp, rank))
    for number, (start, stop) in enumerate(pairwise(offsets)):
        assert (local_ids == number).nonzero().flatten().tolist() == list(range(start, stop))


def test_documents_from_tokens_ids() -> None:
    assert document_ids_from_tokens(torch.tensor([[9, 1, 9, 9, 2]]), 9).tolist() == [[0, 1, 1, 2, 3]]
