"""The order in which samples are consumed, as pure arithmetic. PURE.

One line of samples for the whole run: position p = 0, 1, 2, ... over all data-parallel ranks. With c samples
consumed, microbatch m of rank d holds positions c + (m * dp_size + d) * micro_batch_size and the
micro_batch_size - 1 after it. So the content of a step does not depend on how many ranks share it, and the
count of consumed samples is the whole state.

What a position means is the order's business:

- DatasetOrder ("single"): sample p of the dataset, which megatron-core has shuffled; after its end it begins
  anew in the same order. The dataset is built for all samples of the run, over as many epochs as that takes,
  so that happens only to a run longer than planned or with corpora given without weights (one epoch each).
- ShuffledOrder ("cyclic"): each pass over the dataset in a new order, drawn from (seed, epoch).
- OnceOrder (full validation): each sample once, then padding samples without loss up to a full microbatch on
  all ranks.

Epochs inside megatron-core's dataset (D09). Documents are laid end to end in shuffled order and cut into
samples, so samples begin and end anywhere in a document. All whole epochs are shuffled together; the last one
is kept apart, and read last, when less than 80 % of it is needed. Each epoch reads each token once; what is
left at the very end, less than a sample, is dropped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch


def microbatch_positions(
    consumed: int, microbatch: int, dp_rank: int, dp_size: int, micro_batch_size: int
) -> range:
    """Return the positions of one rank's microbatch; see the note at the top of this module."""
    start = consumed + (microbatch * dp_size + dp_rank) * micro_batch_size
    return range(start, start + micro_batch_size)


class Order(ABC):
    """From positions to indices of a dataset with ``length`` samples."""

    def __init__(self, length: int) -> None:
        assert length > 0
        self.length = length

    @abstractmethod
    def index(self, position: int) -> int | None:
        """Return the dataset's index of a position, None for a padding sample."""

    def microbatches(self, dp_size: int, micro_batch_size: int) -> int | None:
        """Return after how many microbatches the order ends; None: never."""
        return None


class DatasetOrder(Order):
    """The dataset's own order, over and over."""

    def index(self, position: int) -> int:
        """Return the position, modulo the length."""
        return position % self.length


class ShuffledOrder(Order):
    """A new order for each pass."""

    def __init__(self, length: int, seed: int) -> None:
        super().__init__(length)
        self._seed = seed
        self._epoch: int | None = None
        self._permutation = torch.empty(0, dtype=torch.int64)

    def index(self, position: int) -> int:
        """Return the index drawn for the position in its pass."""
        epoch, offset = divmod(position, self.length)
        if epoch != self._epoch:
            # The two numbers are mixed so that (seed, epoch + 1) is not (seed + 1, epoch).
            generator = torch.Generator().manual_seed((self._seed * 1_000_003 + epoch) % 2**63)
            self._permutation = torch.randperm(self.length, generator=generator)
            self._epoch = epoch
        return int(self._permutation[offset])


class OnceOrder(Order):
    """Each sample once."""

    def index(self, position: int) -> int | None:
        """Return the position, None beyond the end."""
        return position if position < self.length else None

    def microbatches(self, dp_size: int, micro_batch_size: int) -> int:
        """Return the microbatches that cover the dataset, the same for all ranks."""
        return -(-self.length // (dp_size * micro_batch_size))


class MicrobatchSampler:
    """One rank's microbatches from ``consumed`` on, as lists of dataset indices: the loader's batch sampler.

    Args:
        order: what positions mean.
        consumed: samples that all ranks together have consumed.
        dp_rank, dp_size, micro_batch_size: this rank's share.
    """

    def __init__(
        self, order: Order, consumed: int, dp_rank: int, dp_size: int, micro_batch_size: int
    ) -> None:
        assert consumed >= 0 and 0 <= dp_rank < dp_size and micro_batch_size > 0
        self._order, self._consumed = order, consumed
        self._share = (dp_rank, dp_size, micro_batch_size)

    def __iter__(self) -> Iterator[list[int | None]]:
        _, dp_size, micro_batch_size = self._share
        end = self._order.microbatches(dp_size, micro_batch_size)
        microbatch = 0
        done = self._consumed // (dp_size * micro_batch_size)
        while end is None or done + microbatch < end:
            positions = microbatch_positions(self._consumed, microbatch, *self._share)
            yield [self._order.index(position) for position in positions]
            microbatch += 1
