"""What a rank computes when the keys of another rank are at hand. PURE: no torch.distributed.

Note [Blocks of a zigzag ring]
Rank r holds chunks r and 2 * cp - 1 - r (balance.py). With the keys of rank j under a causal mask:
- j == r: a plain causal block over the local rows, because local order is global order;
- j < r: chunk j lies before both query chunks, chunk 2 * cp - 1 - j after both: all queries, first half of
  the keys, no mask;
- j > r: both key chunks lie after chunk r and before chunk 2 * cp - 1 - r: second half of the queries, all
  keys, no mask. Each is half of the full block: nothing masked is computed and all ranks do the same work in
  all steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from megatron.parallel.context.balance import Range, zigzag_ranges
from megatron.parallel.context.documents import Documents


@dataclass(frozen=True)
class Segment:
    """One document's piece of a block: rows of its queries and keys, counted from the block's first row."""

    sample: int
    queries: Range
    keys: Range


@dataclass(frozen=True)
class Block:
    """A piece of the attention matrix that needs no mask but a causal one.

    Attributes:
        queries: rows of the local queries.
        keys: rows of the keys at hand.
        causal: a causal mask, aligned at the first row of both; queries and keys are then the same positions.
        segments: one dense piece per document, None for the block as a whole. Empty: nothing to compute.
    """

    queries: Range
    keys: Range
    causal: bool
    segments: tuple[Segment, ...] | None = None


@dataclass(frozen=True)
class BlockPlan:
    """The blocks of one rank.

    Attributes:
        seq_length: tokens of the whole sequence.
        size: context-parallel ranks that share it.
        rank: this one.
        causal: causal mask, or none.
        documents: packed documents that must not see each other, or None.
    """

    seq_length: int
    size: int
    rank: int
    causal: bool
    documents: Documents | None = None

    def block(self, source: int) -> Block:
        """Return the block of this rank's queries with the keys of rank `source`."""
        rows = self.seq_length // self.size
        queries, keys = (0, rows), (0, rows)
        if self.causal and source < self.rank:
            keys = (0, rows // 2)
        elif self.causal and source > self.rank:
            queries = (rows // 2, rows)
        causal = self.causal and source == self.rank
        return Block(queries, keys, causal, self._segments(queries, source, keys))

    def _segments(self, queries: Range, source: int, keys: Range) -> tuple[Segment, ...] | None:
        if self.documents is None:
            return None
        query_ranges = self._global_ranges(self.rank, queries)
        key_ranges = self._global_ranges(source, keys)
        segments = []
        for sample in range(self.documents.batch):
            query_offsets = self.documents.offsets(sample, query_ranges)
            key_offsets = self.documents.offsets(sample, key_ranges)
            spans = zip(pairwise(query_offsets), pairwise(key_offsets), strict=True)
            segments += [Segment(sample, q, k) for q, k in spans if q[0] < q[1] and k[0] < k[1]]
        whole = (0, queries[1] - queries[0]), (0, keys[1] - keys[0])
        if len(segments) == self.documents.batch and all((s.queries, s.keys) == whole for s in segments):
            return None
        return tuple(segments)

    def _global_ranges(self, rank: int, rows: Range) -> list[Range]:
        """Translate local rows of a rank to global ranges."""
        ranges, first = [], 0
        for start, stop in zigzag_ranges(self.seq_length, self.size, rank):
            low, high = max(rows[0] - first, 0), min(rows[1] - first, stop - start)
            if low < high:
                ranges.append((start + low, start + high))
            first += stop - start
        return ranges
