"""Small corpora for the data tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from megatron.train.data import DataConfig
from megatron.train.data.config import Blend
from megatron.train.tokenizers import build_tokenizer


def write_corpus(prefix: Path, documents: Sequence[Sequence[int]], dtype: type[np.number] = np.int32) -> str:
    """Write a .bin/.idx pair and return its prefix."""
    from megatron.tools.indexed_output import IndexedOutput

    with IndexedOutput(str(prefix), dtype) as output:
        for document in documents:
            output.add(np.array(document, dtype=np.int32))
        output.commit()
    return str(prefix)


def unique_documents(lengths: Sequence[int], first: int = 1) -> list[list[int]]:
    """Return documents in which no id comes twice."""
    documents, token = [], first
    for length in lengths:
        documents.append(list(range(token, token + length)))
        token += length
    return documents


def null_tokenizer(size: int = 5000, **more: Any) -> Any:
    """Return a tokenizer of numbers with eod id ``size``."""
    return build_tokenizer(SimpleNamespace(tokenizer_type="NullTokenizer", vocab_size=size, **more))


def data_config(*prefixes: str, weights: Sequence[float] | None = None, **changes: Any) -> DataConfig:
    """Return a small configuration, loading in the caller, over ``prefixes``."""
    fields: dict[str, Any] = {
        "seq_length": 8,
        "micro_batch_size": 2,
        "tokenizer": null_tokenizer(),
        "train_samples": 16,
        "split": "1,0,0",
        "num_workers": 0,
    }
    if prefixes:
        fields["blend"] = Blend(tuple(prefixes), None if weights is None else tuple(weights))
    return DataConfig(**{**fields, **changes})
