"""What a sample holds: masks, positions and document numbers, and how packed documents stay apart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from megatron.train.data.core_import import import_core_datasets
from megatron.train.data.iterators import cu_seqlens

import_core_datasets()

from megatron.train.data.gpt_samples import make_sample  # noqa: E402

EOD = 9


def rules(**changes: bool) -> Any:
    flags = {"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False}
    return SimpleNamespace(tokenizer=SimpleNamespace(eod=EOD), **{**flags, **changes})


def sample(text: list[int], length: int | None = None, **changes: bool) -> dict[str, list[Any]]:
    made = make_sample(np.array(text), len(text) if length is None else length, rules(**changes))
    return {key: value.tolist() for key, value in made.items()}


def test_labels_are_the_tokens_that_follow() -> None:
    made = sample([1, 2, EOD, 3, 4])
    assert made == {
        "tokens": [1, 2, EOD, 3],
        "labels": [2, EOD, 3, 4],
        "loss_mask": [1.0, 1.0, 1.0, 1.0],
        "position_ids": [0, 1, 2, 3],
    }


def test_padding_is_masked_by_position() -> None:
    """D03: pad and end of document share an id; only the tail is masked, a real end is learned."""
    made = sample([1, EOD, 2, -1, -1, -1], length=3)
    assert made["tokens"] == [1, EOD, 2, 0, 0] and made["labels"] == [EOD, 2, 0, 0, 0]
    assert made["loss_mask"] == [1.0, 1.0, 0.0, 0.0, 0.0]
    # The same ids without a tail: nothing is masked, though 0 and the end of document occur.
    assert sample([1, EOD, 2, 0, EOD, 0])["loss_mask"] == [1.0] * 5


def test_padding_sample_has_no_loss() -> None:
    assert sum(sample([1, 2, 3, 4], length=0)["loss_mask"]) == 0


def test_masks_do_not_leak_between_samples() -> None:
    """D02: a sample with padding, one without, and one changed in place leave the next alone."""
    padded = make_sample(np.array([1, 2, -1, -1]), 2, rules())
    whole = make_sample(np.array([1, 2, 3, 4]), 4, rules())
    for tensor in (*padded.values(), *whole.values()):
        tensor.zero_()
    again = make_sample(np.array([1, 2, 3, 4]), 4, rules())
    assert again["loss_mask"].tolist() == [1, 1, 1] and again["position_ids"].tolist() == [0, 1, 2]
    assert again["tokens"].tolist() == [1, 2, 3] and again["labels"].tolist() == [2, 3, 4]


def test_end_of_document_masks_the_loss_behind_it() -> None:
    """--eod-mask-loss: the token after the end of a document is not predicted from it."""
    assert sample([1, EOD, 2, 3, EOD], eod_mask_loss=True)["loss_mask"] == [1.0, 0.0, 1.0, 1.0]


def test_positions_and_documents_begin_anew_behind_the_end() -> None:
    made = sample([1, EOD, 2, 3, EOD, EOD, 4, 5], reset_position_ids=True, reset_attention_mask=True)
    assert made["position_ids"] == [0, 1, 0, 1, 2, 0, 0]
    assert made["document_ids"] == [0, 0, 1, 1, 1, 2, 3]


@pytest.mark.parametrize("flags", [{}, {"reset_position_ids": True}, {"eod_mask_loss": True}])
def test_equal_to_megatron_core(flags: dict[str, bool]) -> None:
    from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids

    text = np.random.RandomState(0).randint(5, 12, size=60)
    made = make_sample(text, 60, rules(**flags))
    settings = (flags.get("reset_position_ids", False), False, flags.get("eod_mask_loss", False), False)
    _, loss_mask, positions = _get_ltor_masks_and_position_ids(made["tokens"], EOD, *settings)
    assert torch.equal(made["loss_mask"], loss_mask) and torch.equal(made["position_ids"], positions)


def test_document_numbers_say_what_megatrons_mask_says() -> None:
    from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids

    text = np.random.RandomState(1).randint(5, 12, size=60)
    made = make_sample(text, 60, rules(reset_attention_mask=True))
    hidden, _, _ = _get_ltor_masks_and_position_ids(made["tokens"], EOD, False, True, False, True)
    assert torch.equal(~hidden[0], visible(made["document_ids"]))


def visible(documents: torch.Tensor, queries: torch.Tensor | None = None) -> torch.Tensor:
    """Return [queries, keys]: causal, within a document. ``queries`` are positions, all by default."""
    at = torch.arange(len(documents))
    queries = at if queries is None else queries
    return (documents[queries, None] == documents[None]) & (queries[:, None] >= at[None])


@pytest.mark.parametrize("context_parallel", [1, 2])
def test_packed_documents_attend_as_if_alone(context_parallel: int) -> None:
    """D11: with document numbers split like all per-token tensors, each rank masks its own queries."""
    text = np.array([1, 2, EOD, 3, EOD, 4, 5, 6, 7, EOD, 8, 1, 2])
    made = make_sample(text, len(text), rules(reset_attention_mask=True))
    documents, length = made["document_ids"], len(text) - 1
    q, k, v = torch.randn(3, 1, 2, length, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    alone = torch.cat(
        [
            scaled_dot_product_attention(*(t[:, :, documents == d] for t in (q, k, v)), is_causal=True)
            for d in documents.unique()
        ],
        dim=2,
    )
    chunks = torch.arange(length).chunk(2 * context_parallel)
    for rank in range(context_parallel):
        mine = torch.cat([chunks[rank], chunks[2 * context_parallel - 1 - rank]])  # the balanced split
        mask = visible(documents, mine)
        packed = scaled_dot_product_attention(q[:, :, mine], k, v, attn_mask=mask)
        assert torch.allclose(packed, alone[:, :, mine], atol=1e-12)


def test_boundaries_for_variable_length_attention() -> None:
    documents = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0]], dtype=torch.int32)
    bounds, longest = cu_seqlens(documents)
    assert bounds.tolist() == [0, 2, 5, 6, 12] and bounds.dtype == torch.int32 and longest == 6
    # Number 0 again at the beginning of the next sample is another document.
    assert cu_seqlens(torch.zeros(2, 3, dtype=torch.int32))[0].tolist() == [0, 3, 6]
