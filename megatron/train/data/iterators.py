"""Iterators over microbatches that know their place and can be put back to it.

A batch is a dict of tensors [micro_batch_size, seq_length] on the CPU (pinned where the config says so):
tokens, labels, loss_mask, position_ids, and document_ids with --reset-attention-mask; gpt_samples.py says
what each holds. All are per token along dimension 1, so a context-parallel rank takes its part of each by the
same index, document_ids included.

Training: ``next(iterators.train)`` once per microbatch. Evaluation: ``for batch in
valid.evaluation(num_microbatches)``. Saving: ``iterators.state_dict()`` beside the model; it is the same on
all ranks and does not depend on their number.

What a resumed run reads (D05, D10, D12):
- training goes on at the first sample not yet consumed, whatever the number of ranks or the micro batch size.
  At the very end of the data it begins the next pass; nothing asserts that samples are left.
- each validation set has a counter of its own. Sampled validation goes on where the last evaluation of that
  set stopped (Megatron's rule); --full-validation reads the whole set at every evaluation and keeps nothing.
  A set that the checkpoint does not know begins at its beginning.
- if the data are not those of the checkpoint, the count of consumed samples is kept and applied to the new
  order, and ``load_state_dict`` returns a sentence that says so and what changed, for the log. To read new data
  from their beginning, start with --finetune.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from megatron.train.data.order import MicrobatchSampler, Order

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class LoaderOptions:
    """One rank's share and how it is loaded. See DataConfig for the fields."""

    dp_rank: int
    dp_size: int
    micro_batch_size: int
    num_workers: int
    pin_memory: bool
    seed: int

    def with_micro_batch_size(self, micro_batch_size: int) -> LoaderOptions:
        """Return a copy with another micro batch size."""
        return dataclasses.replace(self, micro_batch_size=micro_batch_size)

    @property
    def samples_per_microbatch(self) -> int:
        """Samples that one microbatch consumes over all data-parallel ranks."""
        return self.dp_size * self.micro_batch_size


class DataIterator:
    """The microbatches of one rank from one dataset, in the global order.

    Attributes:
        name: "train", "test", "valid" or "valid-<prefix>".
        consumed_samples: position in the global order: samples handed out so far over all data-parallel
            ranks.
        length: samples of the dataset.
    """

    def __init__(
        self,
        dataset: Any,
        order: Order,
        options: LoaderOptions,
        name: str = "train",
        identity: Mapping[str, object] | None = None,
        consumed_samples: int = 0,
    ) -> None:
        self.name = name
        self.consumed_samples = consumed_samples
        self.length = order.length
        self._dataset = _Guarded(dataset)
        self._order = order
        self._options = options
        self._identity = dict(identity or {})
        self._batches: Iterator[Batch | _Failure] | None = None

    def __iter__(self) -> DataIterator:
        return self

    def __next__(self) -> Batch:
        """Return the next microbatch.

        Raises:
            ValueError: the data cannot be used (a token id outside the vocabulary).
            StopIteration: the end of an order that has one (full validation).
        """
        if self._batches is None:
            self._batches = iter(self._loader())
        batch = next(self._batches)
        if isinstance(batch, _Failure):
            self.close()
            raise ValueError(batch.message)
        self.consumed_samples += self._options.samples_per_microbatch
        return batch

    @property
    def microbatches(self) -> int | None:
        """Microbatches of one pass, the same on all ranks; None where the order never ends."""
        return self._order.microbatches(self._options.dp_size, self._options.micro_batch_size)

    def evaluation(self, num_microbatches: int) -> Iterator[Batch]:
        """Yield the microbatches of one evaluation.

        Args:
            num_microbatches: how many; ignored with full validation, which reads the whole set from its
                beginning (``microbatches`` says how many that are).
        """
        if self.microbatches is not None:
            self.seek(0)
            num_microbatches = self.microbatches
        for _ in range(num_microbatches):
            yield next(self)

    def seek(self, consumed_samples: int) -> None:
        """Go on after ``consumed_samples`` of the global order."""
        if consumed_samples < 0:
            raise ValueError(f"consumed samples {consumed_samples}: a position cannot be negative")
        self.close()
        self.consumed_samples = consumed_samples

    def skip(self, num_microbatches: int) -> None:
        """Count microbatches as consumed without reading them: for pipeline stages that need no data."""
        self.seek(self.consumed_samples + num_microbatches * self._options.samples_per_microbatch)

    def state_dict(self) -> dict[str, Any]:
        """Return position and identity of the data: plain values, equal on all ranks."""
        return {"consumed_samples": self.consumed_samples, "identity": dict(self._identity)}

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Go to a saved position; return sentences on what changed in the data since."""
        self.seek(int(state["consumed_samples"]))
        saved = state.get("identity", {})
        changed = sorted(
            key for key in {*saved, *self._identity} if saved.get(key) != self._identity.get(key)
        )
        if not changed:
            return ()
        return (
            f"the {self.name} data are not those of the checkpoint ({', '.join(changed)} changed): going on "
            "at sample "
            f"{self.consumed_samples} of the new order. To read them from the beginning, pass --finetune",
        )

    def close(self) -> None:
        """End the loader processes; the next batch starts new ones."""
        self._batches = None

    def _loader(self) -> DataLoader:
        options = self._options
        sampler = MicrobatchSampler(
            self._order, self.consumed_samples, options.dp_rank, options.dp_size, options.micro_batch_size
        )
        # A generator of its own: without one the loader draws from the global one, which dropout uses too.
        generator = torch.Generator().manual_seed(options.seed + 7919 * options.dp_rank)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            return DataLoader(
                self._dataset,
                batch_sampler=sampler,  # type: ignore[arg-type]
                num_workers=options.num_workers,
                # Workers read mapped files and touch no device, so a fork is safe, and cheap.
                multiprocessing_context="fork" if options.num_workers else None,
                pin_memory=options.pin_memory,
                generator=generator,
                collate_fn=_collate,
            )


@dataclass
class DataIterators:
    """The iterators of a run on one rank.

    Attributes:
        train: None if no training samples are planned.
        valid: one per validation set; several only with --multiple-validation-sets; empty without validation.
        test: None without a test set.
    """

    train: DataIterator | None
    valid: tuple[DataIterator, ...] = ()
    test: DataIterator | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all sets by name: plain values, equal on all ranks."""
        return {iterator.name: iterator.state_dict() for iterator in self._all()}

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Go to the saved places; a set that ``state`` lacks keeps its own.

        Returns:
            Sentences on what changed in the data since, for the caller to report once (every rank gets them).
        """
        messages: list[str] = []
        for iterator in self._all():
            if iterator.name in state:
                messages.extend(iterator.load_state_dict(state[iterator.name]))
            else:
                messages.append(
                    f"the checkpoint knows no {iterator.name} data: they begin at sample "
                    f"{iterator.consumed_samples}"
                )
        return tuple(messages)

    def close(self) -> None:
        """End all loader processes."""
        for iterator in self._all():
            iterator.close()

    def _all(self) -> tuple[DataIterator, ...]:
        return tuple(iterator for iterator in (self.train, *self.valid, self.test) if iterator is not None)


def cu_seqlens(document_ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the boundaries of the documents of a batch laid end to end, as variable-length attention wants
    them.

    Args:
        document_ids: [batch, seq_length] from a batch; whole sequences, before any split over
            context-parallel ranks.

    Returns:
        (cu_seqlens, longest): int32 [documents + 1] beginning with 0 and ending with batch * seq_length; a
        sample's end ends its last document. And the length of the longest one.
    """
    batch, length = document_ids.shape
    begins = torch.ones(batch, length, dtype=torch.bool, device=document_ids.device)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    end = torch.tensor([batch * length], device=document_ids.device)
    bounds = torch.cat([torch.nonzero(begins.flatten()).flatten(), end]).to(torch.int32)
    return bounds, int((bounds[1:] - bounds[:-1]).max())


@dataclass(frozen=True)
class _Failure:
    """A user's error on its way from a loader process, without that process's traceback."""

    message: str


class _Guarded(Dataset):
    """A dataset whose ValueErrors arrive as they are, not wrapped in a worker's traceback."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, index: int | None) -> Batch | _Failure:
        try:
            return self._dataset[index]
        except ValueError as error:
            return _Failure(str(error))


def _collate(samples: list[Batch | _Failure]) -> Batch | _Failure:
    for sample in samples:
        if isinstance(sample, _Failure):
            return sample
    return default_collate(samples)
