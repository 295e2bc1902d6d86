"""Documents packed in one sample: where they start, as plain host data. PURE: no torch.distributed.

Note [Documents stay whole]
Every context-parallel rank reads the whole sample before it is split, so each knows all document boundaries
without communication. They are kept as host integers: attention then cuts its blocks into one dense piece per
document instead of building [s, s] masks, and no step of a layer waits for the device. Make one `Documents`
per microbatch and hand it to all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from megatron.parallel.context.balance import Range


def document_ids_from_tokens(tokens: Tensor, eod: int) -> Tensor:
    """Number the documents of each sample from 0, int64 [b, s]; an end token belongs to what it ends."""
    is_end = (tokens == eod).long()
    return is_end.cumsum(dim=1) - is_end


@dataclass(frozen=True)
class Documents:
    """Document boundaries of a batch of whole sequences (not split over context-parallel ranks).

    Attributes:
        starts: for each sample the first positions of its documents, ascending, beginning with 0.
        length: tokens in each sample.
    """

    starts: tuple[tuple[int, ...], ...]
    length: int

    def __post_init__(self) -> None:
        for starts in self.starts:
            ascending = all(a < b for a, b in pairwise(starts))
            if not starts or starts[0] != 0 or not ascending or starts[-1] >= self.length:
                raise ValueError(
                    f"document starts {starts} must ascend from 0 and stay below the length {self.length}"
                )

    @property
    def batch(self) -> int:
        """Number of samples."""
        return len(self.starts)

    @classmethod
    def from_ids(cls, ids: Tensor) -> Documents:
        """Read boundaries off document ids [b, s], one id per document. Copies them to the host.

        Raises:
            ValueError: an id comes back after another one; attention over such scattered documents is not
                built.
        """
        rows = ids.tolist()
        starts = []
        for row in rows:
            begin = tuple(i for i in range(len(row)) if i == 0 or row[i] != row[i - 1])
            if len({row[i] for i in begin}) != len(begin):
                raise ValueError(
                    "document ids must be contiguous: an id comes back after another document began"
                )
            starts.append(begin)
        return cls(tuple(starts), ids.size(1))

    @classmethod
    def from_tokens(cls, tokens: Tensor, eod: int) -> Documents:
        """Read boundaries off token rows [b, s], as --reset-attention-mask does: documents end with `eod`."""
        return cls.from_ids(document_ids_from_tokens(tokens, eod))

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Sequence[int] | Tensor) -> Documents:
        """Read the boundaries of one sample off cumulative lengths (0, l0, l0 + l1, ..., s)."""
        ends = [int(value) for value in cu_seqlens]
        if len(ends) < 2 or ends[0] != 0:
            raise ValueError(f"cu_seqlens {ends} must begin with 0 and end with the sequence length")
        if any(a > b for a, b in pairwise(ends)):
            raise ValueError(f"cu_seqlens {ends} must not descend")
        return cls((tuple(sorted(set(ends[:-1]) - {ends[-1]})),), ends[-1])

    def ids(self, device: torch.device | str | None = None) -> Tensor:
        """Return document numbers from 0, int64 [b, s]."""
        marks = torch.zeros(self.batch, self.length, dtype=torch.int64, device=device)
        for sample, starts in enumerate(self.starts):
            marks[sample, list(starts[1:])] = 1
        return marks.cumsum(dim=1)

    def position_ids(self, device: torch.device | str | None = None) -> Tensor:
        """Return positions that begin again at each document (--reset-position-ids), int64 [b, s]."""
        positions = torch.arange(self.length, device=device).expand(self.batch, -1)
        first = torch.zeros(self.batch, self.length, dtype=torch.int64, device=device)
        for sample, starts in enumerate(self.starts):
            first[sample, list(starts)] = torch.tensor(starts, device=device)
        return positions - first.cummax(dim=1).values

    def offsets(self, sample: int, ranges: Sequence[Range]) -> list[int]:
        """Count, for each boundary of a sample and its end, the rows of `ranges` that lie before it.

        With `ranges` the ascending global ranges that make up a local tensor, entries i and i + 1 bound
        document i in it: the cu_seqlens of the local rows, with empty documents kept.
        """
        bounds = (*self.starts[sample], self.length)
        return [sum(min(max(bound - start, 0), stop - start) for start, stop in ranges) for bound in bounds]
