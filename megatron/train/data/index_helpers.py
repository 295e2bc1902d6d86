"""megatron-core's index helpers in NumPy: for where its compiled ones are missing, and their check. PURE."""

from __future__ import annotations

import numpy as np

REPLACES = (
    "build_sample_idx_int32",
    "build_sample_idx_int64",
    "build_blending_indices",
    "build_exhaustive_blending_indices",
)


def build_sample_index(
    sizes: np.ndarray,
    document_index: np.ndarray,
    sequence_length: int,
    drop_last: bool = True,
    extra: int = 1,
) -> np.ndarray:
    """Cut the documents, laid end to end, into samples.

    Args:
        sizes: tokens of each document, [number of documents].
        document_index: documents in the order of reading, all epochs, [epochs * documents].
        sequence_length: tokens of a sample; it also reads ``extra`` more, the label of its last token.
        drop_last: drop what is left after the last whole sample; else keep it as one shorter sample.
        extra: 1 where inputs and labels are cut from one piece of sequence_length + 1 tokens, else 0.

    Returns:
        [samples + 1, 2]: (position in document_index, offset in that document) where each sample begins. A
        sample ends ``extra`` tokens after the beginning of the next. int64.
    """
    ends = np.cumsum(sizes[document_index], dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    # Integer arithmetic: megatron-core's compiled helper rounds the last partial sample in float32.
    whole = max(total - extra, 0) // sequence_length
    partial = 0 if drop_last else int(max(total - extra, 0) % sequence_length > 0)
    starts = np.minimum(
        np.arange(whole + partial + 1, dtype=np.int64) * sequence_length, max(total - extra, 0)
    )
    # A start that coincides with the end of a document belongs to the next one that has tokens.
    position = np.minimum(np.searchsorted(ends, starts, side="right"), len(ends) - 1)
    offset = starts - (ends[position] - sizes[document_index[position]])
    return np.stack([position, offset], axis=1)


def build_sample_idx_int32(
    sizes: np.ndarray,
    document_idx: np.ndarray,
    seq_length: int,
    num_epochs: int,
    tokens_per_epoch: int,
    drop_last_partial_sequence: bool = True,
    add_extra_token_to_sequence: int = 1,
) -> np.ndarray:
    """Stand in for the compiled function of this name (same arguments); see build_sample_index."""
    index = build_sample_index(
        sizes, document_idx, seq_length, drop_last_partial_sequence, add_extra_token_to_sequence
    )
    return index.astype(np.int32)


def build_sample_idx_int64(*args: object, **kwargs: object) -> np.ndarray:
    """Stand in for the compiled function of this name (same arguments)."""
    sizes, document_idx, seq_length, _epochs, _tokens, *rest = args
    return build_sample_index(sizes, document_idx, seq_length, *rest, **kwargs)  # type: ignore[arg-type]


def build_blending_indices(
    dataset_index: np.ndarray,
    dataset_sample_index: np.ndarray,
    weights: list[float],
    num_datasets: int,
    size: int,
    verbose: bool = False,
) -> None:
    """Fill both indices: at each sample take the dataset that lags its weight most (first one on ties)."""
    counts = np.zeros(num_datasets, dtype=np.int64)
    shares = np.asarray(weights, dtype=np.float64)
    for sample in range(size):
        chosen = int(np.argmax(shares * max(float(sample), 1.0) - counts))
        dataset_index[sample] = chosen
        dataset_sample_index[sample] = counts[chosen]
        counts[chosen] += 1


def build_exhaustive_blending_indices(
    dataset_index: np.ndarray, dataset_sample_index: np.ndarray, sizes: list[int], num_datasets: int
) -> None:
    """Fill both indices so that each dataset gives exactly its size, spread evenly."""
    limits = np.asarray(sizes, dtype=np.int64)
    counts = np.zeros(num_datasets, dtype=np.int64)
    shares = limits / float(limits.sum())
    for sample in range(int(limits.sum())):
        lag = np.where(counts < limits, shares * max(float(sample), 1.0) - counts, -np.inf)
        chosen = int(np.argmax(lag))
        dataset_index[sample] = chosen
        dataset_sample_index[sample] = counts[chosen]
        counts[chosen] += 1
