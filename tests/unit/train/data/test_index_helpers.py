"""Our NumPy index helpers against megatron-core's compiled ones."""

from __future__ import annotations

import importlib
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.train.data import core_import, index_helpers

core_import.import_core_datasets()


@pytest.fixture(scope="module")
def compiled():
    return pytest.importorskip("megatron.core.datasets.helpers_cpp")


@settings(deadline=None, max_examples=50)
@given(
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=12),
    epochs=st.integers(1, 3),
    length=st.integers(2, 9),
    drop_last=st.booleans(),
)
def test_sample_index_equals_the_compiled_one(
    compiled, sizes: list[int], epochs: int, length: int, drop_last: bool
) -> None:
    tokens = sum(sizes)
    if tokens < 2:
        return
    lengths = np.array(sizes, dtype=np.int32)
    documents = np.random.RandomState(0).permutation(np.tile(np.arange(len(sizes), dtype=np.int32), epochs))
    want = compiled.build_sample_idx_int64(lengths, documents, length, epochs, tokens, drop_last, 1)
    got = index_helpers.build_sample_idx_int64(lengths, documents, length, epochs, tokens, drop_last, 1)
    # Where a sample begins is compared as a place in the text: next to documents without tokens there are
    # several ways to write one.
    starts = np.concatenate([[0], np.cumsum(lengths[documents])])
    assert np.array_equal(starts[got[:, 0]] + got[:, 1], starts[want[:, 0]] + want[:, 1])


@pytest.mark.parametrize("length", [4095, 4096, 1 << 20])
def test_last_partial_sample_is_counted_exactly_in_large_sets(length: int) -> None:
    """Above 2^24 tokens float32 arithmetic miscounts."""
    total = 2**31 + 12345
    sizes = np.array([2**30, 2**30, 12345], dtype=np.int32)
    index = index_helpers.build_sample_index(sizes, np.arange(3), length, drop_last=False)[-2:]
    samples = -(-(total - 1) // length)
    # Not built in full: the last two rows say how many there are.
    starts = np.array([0, 2**30, 2**31])[index[:, 0]] + index[:, 1]
    assert starts.tolist() == [(samples - 1) * length, total - 1]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0.05, 5), min_size=1, max_size=5), st.integers(1, 60))
def test_blending_equals_the_compiled_one(compiled, weights: list[float], size: int) -> None:
    shares = [weight / sum(weights) for weight in weights]
    results = []
    for helper in (compiled, index_helpers):
        datasets, samples = np.zeros(size, np.int16), np.zeros(size, np.int64)
        helper.build_blending_indices(datasets, samples, shares, len(shares), size, False)
        results.append((datasets.tolist(), samples.tolist()))
    assert results[0] == results[1]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=5))
def test_exhaustive_blending_equals_the_compiled_one(compiled, sizes: list[int]) -> None:
    results = []
    for helper in (compiled, index_helpers):
        datasets, samples = np.zeros(sum(sizes), np.int16), np.zeros(sum(sizes), np.int64)
        helper.build_exhaustive_blending_indices(datasets, samples, sizes, len(sizes))
        results.append((datasets.tolist(), samples.tolist()))
    assert results[0] == results[1]


def test_they_stand_in_where_nothing_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "megatron.core.datasets.helpers_cpp"
    monkeypatch.setitem(sys.modules, name, None)  # the import system's way to say "not there"
    core_import._import_helpers()
    module = importlib.import_module(name)
    assert module.build_sample_idx_int32 is index_helpers.build_sample_idx_int32
    index = module.build_sample_idx_int32(
        np.array([5, 6], np.int32), np.array([1, 0], np.int32), 4, 1, 11, True, 1
    )
    assert index.dtype == np.int32 and index.tolist() == [[0, 0], [0, 4], [1, 2]]
