"""The tokenizer protocol and what all tokenizers share."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path


class Tokenizer(ABC):
    """Text to token ids and back.

    Attributes:
        name: the value of --tokenizer-type that builds it.
        vocab_size: number of ids, special ones included; every id lies in [0, vocab_size).
        eod: id that ends a document (--append-eod), never None.
        bos, pad: ids, or None where the vocabulary has none. Padding in samples is known by its position, so
            pad may well equal eod.
    """

    name: str
    vocab_size: int
    eod: int
    bos: int | None = None
    pad: int | None = None

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Return the ids of ``text``, without end of document. Only Llama2Tokenizer puts its bos in front."""

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``. Special ids give nothing."""

    @property
    def identity(self) -> dict[str, object]:
        """What tells this vocabulary from another; part of the keys of cached sample indices."""
        return {
            "tokenizer": self.name,
            "vocab_size": self.vocab_size,
            "eod": self.eod,
            **self._file_identity(),
        }

    def _file_identity(self) -> dict[str, object]:
        return {}


def digest(*paths: Path) -> dict[str, object]:
    """Return a short content hash of vocabulary files, so that a moved file is still the same vocabulary."""
    state = hashlib.sha256()
    for path in paths:
        state.update(path.read_bytes())
    return {"files": state.hexdigest()[:16]}


def require_file(flag: str, value: str | None, what: str, tokenizer: str) -> Path:
    """Return the path given by ``flag``.

    Raises:
        ValueError: the flag is missing, or nothing lies at its path.
    """
    if not value:
        raise ValueError(f"--tokenizer-type {tokenizer} needs {flag} ({what}): pass {flag} PATH")
    path = Path(value).expanduser()
    if not path.exists():
        raise ValueError(
            f"{flag} {value}: no such file; pass the path of {what} (nothing is ever downloaded: fetch it "
            "beforehand)"
        )
    if path.is_file() and path.stat().st_size == 0:
        raise ValueError(f"{flag} {value}: the file is empty; pass the path of {what}")
    return path


def missing_package(package: str, tokenizer: str) -> ValueError:
    """Return the error for an optional package that is not installed."""
    return ValueError(
        f"--tokenizer-type {tokenizer} needs the Python package {package}: pip install {package}"
    )


def padded_vocab_size(size: int, make_divisible_by: int, tensor_parallel_size: int) -> int:
    """Return the rows of the embedding: ``size`` rounded up to a multiple of make_divisible_by *
    tensor_parallel_size.

    Raises:
        ValueError: a value that is not positive.
    """
    for flag, value in (
        ("the vocabulary", size),
        ("--make-vocab-size-divisible-by", make_divisible_by),
        ("--tensor-model-parallel-size", tensor_parallel_size),
    ):
        if value < 1:
            raise ValueError(f"{flag} is {value}: it must be at least 1")
    multiple = make_divisible_by * tensor_parallel_size
    return (size + multiple - 1) // multiple * multiple
