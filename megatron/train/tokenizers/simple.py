"""Tokenizers that need no file: bytes, and numbers written as text."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.train.tokenizers.base import Tokenizer


class ByteLevelTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0..255; 256 ends a document, 257 begins one, 258 pads."""

    name = "ByteLevelTokenizer"
    vocab_size = 259
    eod = 256
    bos = 257
    pad = 258

    def tokenize(self, text: str) -> list[int]:
        """Return the bytes of ``text``."""
        return list(text.encode("utf-8"))

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text; bytes that are no UTF-8 become the replacement character."""
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class NullTokenizer(Tokenizer):
    """Numbers separated by spaces, for benchmarks and mock data.

    As in Megatron, --vocab-size counts the ids without the end of document, which is by default one more id
    at the end.

    Args:
        size: --vocab-size.
        eod: --null-tokenizer-eod-id, None for the default.
        pad: --null-tokenizer-pad-id; negative for none.
    """

    name = "NullTokenizer"

    def __init__(self, size: int | None, eod: int | None = None, pad: int | None = None) -> None:
        if size is None or size < 1:
            raise ValueError(
                f"--vocab-size {size}: --tokenizer-type NullTokenizer has no vocabulary of its own; "
                "pass --vocab-size with a number of at least 1"
            )
        self.eod = size if eod is None else eod
        if self.eod < 0:
            raise ValueError(f"--null-tokenizer-eod-id {eod}: pass an id of at least 0")
        self.vocab_size = max(size, self.eod + 1)
        self.pad = pad if pad is not None and pad >= 0 else None

    def tokenize(self, text: str) -> list[int]:
        """Return the numbers in ``text``.

        Raises:
            ValueError: a word that is no number of the vocabulary.
        """
        try:
            ids = [int(word) for word in text.split()]
        except ValueError:
            raise ValueError(
                f"--tokenizer-type NullTokenizer reads numbers separated by spaces, not {text[:40]!r}: "
                "pass another --tokenizer-type for text"
            ) from None
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise ValueError(
                f"--vocab-size: an id outside [0, {self.vocab_size}) in {text[:40]!r}; pass a larger "
                "--vocab-size"
            )
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the numbers as text."""
        return " ".join(str(i) for i in ids if i != self.eod)
