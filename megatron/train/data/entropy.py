"""How predictable a corpus is without any context: the bar that a trained model has to pass."""

from __future__ import annotations

import numpy as np

from megatron.train.data.files import check_indexed_files


def unigram_entropy(prefix: str, block: int = 1 << 24) -> float:
    """Return the entropy of the distribution of single tokens, in nats per token.

    -sum(p * log(p)) over the ids of ``prefix``.bin (Shannon, 1948): the loss of a model that knows only how
    frequent each token is. Streams the file in blocks of ``block`` tokens.

    Raises:
        ValueError: the files are missing or corrupt.
    """
    files = check_indexed_files(prefix, "prefix")
    ids = np.memmap(f"{prefix}.bin", mode="r", dtype=files.dtype)
    counts = np.zeros(0, dtype=np.int64)
    for start in range(0, len(ids), block):
        more = np.bincount(ids[start : start + block])
        if len(more) > len(counts):
            counts, more = more, counts
        counts[: len(more)] += more
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
