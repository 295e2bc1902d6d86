"""The global order: the same for any number of ranks, and resumable anywhere."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.train.data.order import (
    DatasetOrder,
    MicrobatchSampler,
    OnceOrder,
    Order,
    ShuffledOrder,
    microbatch_positions,
)

sizes = st.integers(1, 6)


def consumed_in_order(
    order: Order, consumed: int, dp_size: int, micro: int, microbatches: int
) -> list[int | None]:
    """Return what all ranks read together, microbatch by microbatch, rank by rank."""
    ranks = [
        list(islice(iter(MicrobatchSampler(order, consumed, rank, dp_size, micro)), microbatches))
        for rank in range(dp_size)
    ]
    return [index for microbatch in range(len(ranks[0])) for rank in ranks for index in rank[microbatch]]


@settings(deadline=None, max_examples=40)
@given(consumed=st.integers(0, 1000), microbatch=st.integers(0, 50), dp_size=sizes, micro=sizes)
def test_sample_of_microbatch_and_rank(consumed: int, microbatch: int, dp_size: int, micro: int) -> None:
    """Sample (m * dp + d) * mbs after those consumed belongs to microbatch m of rank d."""
    for rank in range(dp_size):
        found = list(microbatch_positions(consumed, microbatch, rank, dp_size, micro))
        assert found == [consumed + (microbatch * dp_size + rank) * micro + i for i in range(micro)]


@settings(deadline=None, max_examples=40)
@given(length=st.integers(1, 40), consumed=st.integers(0, 100), dp_size=sizes, micro=sizes, steps=sizes)
def test_order_does_not_depend_on_ranks(
    length: int, consumed: int, dp_size: int, micro: int, steps: int
) -> None:
    count = dp_size * micro * steps
    alone = consumed_in_order(DatasetOrder(length), consumed, 1, 1, count)
    assert alone == [(consumed + i) % length for i in range(count)]
    assert consumed_in_order(DatasetOrder(length), consumed, dp_size, micro, steps) == alone


@settings(deadline=None, max_examples=40)
@given(length=st.integers(1, 40), seed=st.integers(0, 5), dp_size=sizes, micro=sizes, steps=sizes)
def test_shuffled_order_does_not_depend_on_ranks_or_resuming(
    length: int, seed: int, dp_size: int, micro: int, steps: int
) -> None:
    count = dp_size * micro * steps
    whole = consumed_in_order(ShuffledOrder(length, seed), 0, 1, 1, 2 * count)
    assert consumed_in_order(ShuffledOrder(length, seed), 0, dp_size, micro, 2 * steps) == whole
    assert consumed_in_order(ShuffledOrder(length, seed), count, dp_size, micro, steps) == whole[count:]


@settings(deadline=None, max_examples=40)
@given(length=st.integers(1, 40), before=st.tuples(sizes, sizes, sizes), after=st.tuples(sizes, sizes, sizes))
def test_resuming_on_other_ranks_continues(
    length: int, before: tuple[int, int, int], after: tuple[int, int, int]
) -> None:
    """What was read before a resume and after it, on other sizes, is one unbroken line."""
    order = DatasetOrder(length)
    first = consumed_in_order(order, 0, *before)
    second = consumed_in_order(order, len(first), *after)
    assert first + second == consumed_in_order(order, 0, 1, 1, len(first) + len(second))


@settings(deadline=None, max_examples=40)
@given(length=st.integers(1, 40), epochs=st.integers(1, 3), seed=st.integers(0, 3))
def test_each_pass_reads_each_sample_once(length: int, epochs: int, seed: int) -> None:
    """D09: in every order a pass is a permutation."""
    for order in (DatasetOrder(length), ShuffledOrder(length, seed)):
        found = [order.index(position) for position in range(epochs * length)]
        for epoch in range(epochs):
            assert sorted(found[epoch * length : (epoch + 1) * length]) == list(range(length))


def test_passes_differ_and_follow_the_seed() -> None:
    passes = {
        (seed, epoch): tuple(ShuffledOrder(50, seed).index(epoch * 50 + i) for i in range(50))
        for seed in (1, 2)
        for epoch in (0, 1)
    }
    assert len(set(passes.values())) == 4


@pytest.mark.parametrize("consumed", [12, 13, 24, 1000])
def test_beginning_at_or_beyond_the_end_goes_on(consumed: int) -> None:
    """D05: all of the data consumed is a position like any other."""
    assert consumed_in_order(DatasetOrder(12), consumed, 2, 2, 1) == [(consumed + i) % 12 for i in range(4)]


@settings(deadline=None, max_examples=40)
@given(length=st.integers(1, 40), dp_size=sizes, micro=sizes)
def test_once_order_covers_the_set_and_ends_on_all_ranks_alike(length: int, dp_size: int, micro: int) -> None:
    order = OnceOrder(length)
    lists = [list(MicrobatchSampler(order, 0, rank, dp_size, micro)) for rank in range(dp_size)]
    assert {len(ranks) for ranks in lists} == {order.microbatches(dp_size, micro)}
    found = consumed_in_order(order, 0, dp_size, micro, len(lists[0]))
    assert found[:length] == list(range(length))
    assert all(index is None for index in found[length:]) and len(found) - length < dp_size * micro
