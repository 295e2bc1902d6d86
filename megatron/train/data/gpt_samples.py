"""GPT samples: megatron-core's GPTDataset with our rules for masks, padding and cached indices.

Importing this module imports megatron.core (seconds): it is imported where datasets are built, not before.

What a sample holds, each [seq_length]:
    tokens, labels (int64): labels are the tokens that follow.
    loss_mask (float32): 0 at padding, and at end-of-document inputs with --eod-mask-loss.
    position_ids (int64): 0, 1, 2, ...; from 0 again after each end of document with --reset-position-ids.
    document_ids (int32), only with --reset-attention-mask: number of the document within the sample. A token
    may attend to
        those before it with its own number. This stands for Megatron's [seq, seq] mask; as a per-token tensor
        it can be split over context-parallel ranks like all the others. ``cu_seqlens`` in iterators.py gives
        Transformer Engine's form.

Padding is known by its position: the sample is filled up with -1, which is no token, so pad ids, end of
document and real tokens may share an id (D03). Nothing is cached between samples, so nothing can leak from
one to another (D02).
"""

from __future__ import annotations

import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.train.data.cache import Arrays, CacheEntry, cached_arrays
from megatron.train.data.core_import import import_core_datasets
from megatron.train.data.files import IndexedFiles, check_ids
from megatron.train.data.fim import FillInTheMiddle
from megatron.train.data.index_helpers import build_sample_index

import_core_datasets()

from megatron.core.datasets.blended_dataset import BlendedDataset  # noqa: E402
from megatron.core.datasets.blended_megatron_dataset_builder import (  # noqa: E402
    BlendedMegatronDatasetBuilder,
)
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset  # noqa: E402
from megatron.core.datasets.utils import Split  # noqa: E402

_PADDING = -1
_INDEX_NAMES = ("document_index", "sample_index", "shuffle_index")
_BLEND_NAMES = ("dataset_index", "dataset_sample_index")


@dataclass
class SampleConfig(GPTDatasetConfig):
    """megatron-core's configuration and what our samples add to it.

    Attributes:
        cache_folder: where indices are kept; None: beside each corpus.
        files: what check_indexed_files found, by prefix.
        fim: fill-in-the-middle, or None.
    """

    cache_folder: str | None = None
    files: dict[str, IndexedFiles] = field(default_factory=dict)
    fim: FillInTheMiddle | None = None


class VocabularyView:
    """What megatron-core asks of a tokenizer, with the padding that is no token."""

    def __init__(self, vocab_size: int, eod: int, identity: dict[str, object]) -> None:
        self.vocab_size = vocab_size
        self.eod = eod
        self.pad = _PADDING
        self.unique_identifiers = identity


class _SampleRules:
    """Our rules, mixed in before megatron-core's dataset classes."""

    config: SampleConfig
    indices: np.ndarray

    def __init__(
        self,
        indexed_dataset: Any,
        dataset_path: str | None,
        indexed_indices: np.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: SampleConfig,
    ) -> None:
        _check_enough(dataset_path, indexed_dataset, indexed_indices, num_samples, index_split, config)
        super().__init__(  # type: ignore[call-arg]
            indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config
        )

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        """Return the sample; None gives a padding sample, which has no loss."""
        text, _ = self._query_document_sample_shuffle_indices(0 if idx is None else idx)
        length = int(np.count_nonzero(text != _PADDING)) if text[-1] == _PADDING else len(text)
        lowest, highest = int(text[:length].min()), int(text[:length].max())
        check_ids(lowest, highest, self.config.tokenizer.vocab_size, f"--data-path {self.dataset_path}")
        if self.config.fim is not None and idx is not None:
            filled = self.config.fim.apply(text[:length], idx)
            length = len(filled)
            text = np.concatenate((filled, np.full(len(text) - length, _PADDING, dtype=text.dtype)))
        return make_sample(text, 0 if idx is None else length, self.config)

    def order_digest(self) -> dict[str, object]:
        """Return what identifies the order of samples, without paths; see _identity in build.py."""
        documents, shuffle = (
            zlib.crc32(a[: 1 << 16].tobytes()) for a in (self.document_index, self.shuffle_index)
        )
        epochs = len(self.document_index) // len(self.indices)
        return {"epochs": epochs, "order": f"{documents:08x}-{shuffle:08x}"}

    def _build_document_sample_shuffle_indices(self) -> Arrays:
        entry = None if self.config.mock else self._cache_entry()
        return cached_arrays(entry, self._build_indices, self._fits)

    def _fits(self, arrays: Arrays) -> bool:
        documents, samples, shuffle = arrays
        return len(shuffle) == len(samples) - 1 and len(documents) % len(self.indices) == 0

    def _is_full_validation(self) -> bool:
        return self.index_split == Split.valid and not self.config.drop_last_partial_validation_sequence

    def _build_indices(self) -> Arrays:
        if not self._is_full_validation():
            return super()._build_document_sample_shuffle_indices()  # type: ignore[misc]
        # Full validation: every document once. megatron-core counts such samples in float32, wrong above 2^24
        # tokens.
        documents = np.asarray(self.indices, dtype=np.int32)
        sample_index = build_sample_index(
            self.dataset.sequence_lengths, documents, self.config.sequence_length, drop_last=False
        )
        return documents, sample_index, np.arange(len(sample_index) - 1, dtype=np.int64)

    def _cache_entry(self) -> CacheEntry:
        prefix = str(self.dataset_path)
        folder = Path(self.config.cache_folder) if self.config.cache_folder else Path(prefix).parent / "cache"
        # megatron-core's own key says nothing of the content: a corpus made anew under its old name needs a
        # new index.
        content = self.config.files[prefix].fingerprint
        rule = "-full" if self._is_full_validation() else ""
        key = f"{self.unique_description_hash}-{content}-{self.index_split.name}{rule}"
        return CacheEntry(folder, key, _INDEX_NAMES, self.unique_description)


class GPTSamples(_SampleRules, GPTDataset):
    """Samples of one corpus."""


class MockSamples(_SampleRules, MockGPTDataset):
    """Made-up samples: documents that count upwards."""


class BlendedSamples(BlendedDataset):
    """Samples of several corpora in given shares."""

    def _is_full_validation(self) -> bool:
        return self.index_split == Split.valid and not self.config.drop_last_partial_validation_sequence

    def _build_indices(self) -> Arrays:
        folder = self.config.cache_folder
        contents = "-".join(str(dataset.order_digest()["order"]) for dataset in self.datasets)
        key = f"{self.unique_description_hash}-{zlib.crc32(contents.encode()):08x}-{self.split.name}-blend"
        entry = CacheEntry(Path(folder), key, _BLEND_NAMES, self.unique_description) if folder else None
        return cached_arrays(
            entry, super()._build_indices, lambda arrays: len(arrays[0]) == len(arrays[1]) > 0
        )

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        """Return the sample; None gives a padding sample, which has no loss."""
        if idx is None:
            return self.datasets[0][None]
        return self.datasets[self.dataset_index[idx]][int(self.dataset_sample_index[idx])]

    def order_digest(self) -> dict[str, object]:
        """Return what identifies the order of samples, next to the weights: how they interleave follows."""
        return {"sets": [dataset.order_digest() for dataset in self.datasets]}


class SampleBuilder(BlendedMegatronDatasetBuilder):
    """megatron-core's builder without its collectives: ranks meet at the cache's file lock instead (D08)."""

    @staticmethod
    def build_generic_dataset(cls: Any, is_built_on_rank: Any, synchronize_ranks: bool, *args: Any) -> Any:
        """Build on this rank, now."""
        return (BlendedSamples if cls is BlendedDataset else cls)(*args)

    def _build_megatron_datasets_parallel(self, prefixes: Any, split: Any, sizes_per_dataset: Any) -> Any:
        with ThreadPoolExecutor(max_workers=max(1, self.config.num_dataset_builder_threads)) as pool:
            per_prefix = list(
                pool.map(
                    self._build_megatron_dataset_splits, prefixes, [split] * len(prefixes), sizes_per_dataset
                )
            )
        return [list(datasets) for datasets in zip(*per_prefix, strict=True)]


def make_sample(text: np.ndarray, length: int, config: SampleConfig) -> dict[str, torch.Tensor]:
    """Cut ``text`` [seq_length + 1], of which the first ``length`` are tokens and the rest padding, into a
    sample.

    Every tensor is new. Padding inputs and labels read 0, with loss mask 0.
    """
    sequence = len(text) - 1
    known = torch.from_numpy(np.where(np.arange(len(text)) < length, text, 0)).long()
    tokens, labels = known[:-1].clone(), known[1:].clone()
    at = torch.arange(sequence)
    loss_mask = (at < length - 1).float()
    is_end = (tokens == config.tokenizer.eod) & (at < length)
    if config.eod_mask_loss:
        loss_mask[is_end] = 0.0
    sample = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, "position_ids": at}
    # The end of document belongs to the document that it ends: the next one begins behind it.
    document = torch.zeros(sequence, dtype=torch.int64)
    document[1:] = torch.cumsum(is_end, 0)[:-1]
    if config.reset_position_ids:
        begins = torch.cat([torch.zeros(1, dtype=torch.int64), torch.nonzero(is_end).flatten() + 1])
        sample["position_ids"] = at - begins[document]
    if config.reset_attention_mask:
        sample["document_ids"] = document.to(torch.int32)
    return sample


def _check_enough(
    path: str | None,
    dataset: Any,
    documents: np.ndarray,
    samples: int | None,
    split: Split,
    config: SampleConfig,
) -> None:
    """Refuse a split without tokens (megatron-core would count epochs for ever) or without one sample."""
    tokens = int(np.sum(dataset.sequence_lengths[documents], dtype=np.int64))
    if tokens == 0:
        raise ValueError(
            f"{path}: the {len(documents)} documents for {split.name} hold no text: give {split.name} a larger share "
            f"in --split or a path of its own (--{split.name}-data-path)"
        )
    padded = split == Split.valid and not config.drop_last_partial_validation_sequence
    if samples is None and tokens < config.sequence_length + 1 and not (padded and tokens > 1):
        raise ValueError(
            f"{path} holds {tokens} tokens for {split.name}, fewer than one sample of "
            f"{config.sequence_length + 1}: lower --seq-length, add text, or give the corpora weights so "
            "that this one is repeated"
        )
