"""The blocks of a ring cover the mask exactly once, and cost the same on every rank."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.parallel.context.balance import zigzag_indices
from megatron.parallel.context.documents import Documents
from megatron.parallel.context.plan import Block, BlockPlan


def block_pairs(block: Block, batch: int, rows: int) -> torch.Tensor:
    """Count [batch, rows, rows] how often a block computes each pair of local query and key."""
    count = torch.zeros(batch, rows, rows, dtype=torch.int64)

    def add(samples: slice, queries: tuple[int, int], keys: tuple[int, int]) -> None:
        piece = torch.ones(queries[1] - queries[0], keys[1] - keys[0], dtype=torch.int64)
        count[samples, slice(*queries), slice(*keys)] += piece.tril() if block.causal else piece

    if block.segments is None:
        add(slice(None), block.queries, block.keys)
    for segment in block.segments or ():
        queries, keys = (
            (span[0] + base[0], span[1] + base[0])
            for span, base in ((segment.queries, block.queries), (segment.keys, block.keys))
        )
        add(slice(segment.sample, segment.sample + 1), queries, keys)
    return count


@given(
    cp=st.integers(1, 5),
    chunk=st.integers(1, 4),
    causal=st.booleans(),
    cuts=st.lists(st.sets(st.integers(1, 39), max_size=5), min_size=0, max_size=2),
)
@settings(max_examples=60, deadline=None)
def test_blocks_cover_the_mask_exactly_once(cp: int, chunk: int, causal: bool, cuts: list[set[int]]) -> None:
    seq, batch = 2 * cp * chunk, max(1, len(cuts))
    documents = None
    wanted = torch.ones(batch, seq, seq, dtype=torch.int64)
    if cuts:
        documents = Documents(tuple((0, *sorted(c for c in cut if c < seq)) for cut in cuts), seq)
        ids = documents.ids()
        wanted *= ids[:, :, None] == ids[:, None, :]
    if causal:
        wanted = wanted.tril()
    for rank in range(cp):
        plan = BlockPlan(seq, cp, rank, causal, documents)
        queries = zigzag_indices(seq, cp, rank)
        for source in range(cp):
            keys = zigzag_indices(seq, cp, source)
            got = block_pairs(plan.block(source), batch, seq // cp)
            assert torch.equal(got, wanted[:, queries][:, :, keys]), (rank, source)


def test_causal_steps_cost_the_same_on_every_rank() -> None:
    cp, seq = 4, 64
    for step in range(1, cp):
        work = {
            int(block_pairs(BlockPlan(seq, cp, rank, True).block((rank - step) % cp), 1, seq // cp).sum())
            for rank in range(cp)
        }
        assert work == {(seq // cp) ** 2 // 2}


def test_blocks_without_a_common_document_are_skipped() -> None:
    seq, cp = 16, 2
    documents = Documents(((0, 4, 8, 12),), seq)
    assert BlockPlan(seq, cp, 0, True, documents).block(1).segments == ()


def test_one_document_needs_no_segments() -> None:
    documents = Documents(((0,), (0,)), 16)
    assert all(BlockPlan(16, 2, 0, True, documents).block(source).segments is None for source in range(2))
