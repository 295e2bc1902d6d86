"""Fill-in-the-middle: every permuted document can be put together again; draws depend on the sample alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.train.data import build_data_iterators
from megatron.train.data.fim import FillInTheMiddle, fill_in_the_middle
from tests.unit.train.data.corpora import data_config, write_corpus

PREFIX, MIDDLE, SUFFIX, SPLIT, EOD = 1, 2, 3, 4, 0


class Letters:
    """A token is a letter; the marks are letters too."""

    eod = EOD

    def tokenize(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def detokenize(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


FIM = FillInTheMiddle(Letters(), 1.0, 0.5, PREFIX, MIDDLE, SUFFIX, seed=7)


def restored(tokens: list[int]) -> list[int]:
    """The document that a permuted one was made from."""
    assert tokens[0] == PREFIX
    middle, suffix = tokens.index(MIDDLE), tokens.index(SUFFIX)
    if suffix == 1:  # prefix and middle stand together behind the last mark
        return tokens[middle + 1 :] + tokens[2:middle]
    return tokens[1:suffix] + tokens[middle + 1 :] + tokens[suffix + 1 : middle]


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4), number=st.integers(0, 999))
def test_documents_can_be_put_together_again(lengths: list[int], number: int) -> None:
    documents = [list(range(97, 97 + length)) for length in lengths]
    tokens = np.array([token for document in documents for token in (*document, EOD)])
    room = np.concatenate((tokens, np.full(3 * len(lengths), EOD)))  # three marks a document
    out = FIM.apply(room, number).tolist()
    assert len(out) == len(room) and out == FIM.apply(room, number).tolist()
    found: list[list[int]] = [[]]
    for token in out:
        found[-1].append(token) if token != EOD else found.append([])
    assert [restored(piece) for piece in found[: len(lengths)]] == documents
    assert dataclasses.replace(FIM, rate=0.0).apply(room, number).tolist() == room.tolist()
    assert len(FIM.apply(tokens, number)) == len(tokens)


def test_both_orders_and_what_stays() -> None:
    tokens = np.arange(97, 117)
    first = [FIM.apply(tokens, number).tolist()[1] == SUFFIX for number in range(40)]
    assert 8 < sum(first) < 32
    assert FIM.apply(tokens, 1).tolist() != FIM.apply(tokens, 2).tolist()
    stays = dataclasses.replace(FIM, no_prefix="abc")
    assert stays.apply(tokens, 1).tolist() == tokens.tolist()
    parts = dataclasses.replace(FIM, split_token=SPLIT, fragment_rate=1.0, rate=0.0)
    text = np.array([97, 98, SPLIT, 99, 100, *[EOD] * 9])
    assert parts.apply(text, 1).tolist().count(PREFIX) == 2


def test_samples_are_filled(tmp_path: Path) -> None:
    """Batches hold the marks; a sample that grew is cut, one that shrank ends in padding without loss."""
    prefix = write_corpus(tmp_path / "text", [[*range(97, 127), EOD]] * 20)
    config = data_config(prefix, fim=FIM, seq_length=16, train_samples=8)
    batch = next(build_data_iterators(config).train)
    assert (batch["tokens"] == PREFIX).any() and batch["tokens"].shape == (2, 16)
    plain = next(build_data_iterators(data_config(prefix, seq_length=16, train_samples=8)).train)
    assert not (plain["tokens"] == PREFIX).any()


def arguments(**changes: Any) -> SimpleNamespace:
    fields = {
        "fim_data": True, "fim_rate": 0.5, "fim_spm_rate": 0.25, "fim_fragment_rate": None, "fim_split_sample": None,
        "fim_no_prefix": "x", "fim_prefix_token": "\x01", "fim_middle_token": "\x02", "fim_suffix_token": "\x03",
        "seed": 7,
    }  # fmt: skip
    return SimpleNamespace(**{**fields, **changes})


def test_flags() -> None:
    made = fill_in_the_middle(arguments(), Letters())
    assert made is not None
    assert (made.rate, made.spm_rate, made.prefix, made.middle, made.suffix, made.no_prefix) == (
        0.5,
        0.25,
        1,
        2,
        3,
        "x",
    )
    assert fill_in_the_middle(arguments(fim_data=False), Letters()) is None
    with pytest.raises(ValueError, match="--fim-rate 1.5: give a number"):
        fill_in_the_middle(arguments(fim_rate=1.5), Letters())
    with pytest.raises(ValueError, match="--fim-middle-token <mid> is 5 tokens"):
        fill_in_the_middle(arguments(fim_middle_token="<mid>"), Letters())
