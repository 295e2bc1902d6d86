"""The work of preprocess_data's worker processes: from raw documents to token ids."""

from __future__ import annotations

import json
import signal
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.tools.text_input import Piece
from megatron.train.tokenizers import Tokenizer, build_tokenizer

_MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True)
class EncodedBatch:
    """Some documents in the order of the input.

    Attributes:
        documents: ids by JSON key, one dict per document with text.
        empty: documents left out because they have none.
        tokens: in all documents.
        position: see Piece.position, of the last document.
    """

    documents: list[dict[str, np.ndarray]]
    empty: int
    tokens: int
    position: int


@dataclass(frozen=True)
class Encoder:
    """What turns one document into ids."""

    tokenizer: Tokenizer
    keys: tuple[str, ...]
    append_eod: bool

    def encode(self, piece: Piece) -> dict[str, np.ndarray]:
        """Return the ids of each key that has text.

        Raises:
            ValueError: not JSON, a key is missing, not text, or a document too long for the format.
        """
        encoded = {}
        for key, text in self._texts(piece).items():
            ids = self.tokenizer.tokenize(text)
            if not ids:
                continue
            if self.append_eod:
                ids.append(self.tokenizer.eod)
            if len(ids) > _MAX_TOKENS:
                raise ValueError(f"{piece.source}: {len(ids)} tokens are too long for one document: split it")
            encoded[key] = np.array(ids, dtype=np.int32)
        return encoded

    def _texts(self, piece: Piece) -> dict[str, str]:
        try:
            content = piece.raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{piece.source} is not UTF-8 (byte {error.start}): convert the file") from None
        if not piece.is_json:
            return {self.keys[0]: content}
        try:
            entry = json.loads(content)
        except ValueError as error:
            raise ValueError(
                f"{piece.source} is not JSON ({error}): each line must be an object such as "
                '{"text": "..."}; plain text belongs in a file named .txt'
            ) from None
        if not isinstance(entry, dict):
            raise ValueError(f'{piece.source} is JSON but no object such as {{"text": "..."}}')
        for key in self.keys:
            if not isinstance(entry.get(key), str):
                has = ", ".join(entry) or "nothing"
                problem = "is not text" if key in entry else "is missing"
                raise ValueError(f"{piece.source}: the key {key} {problem} (found: {has}); pass --json-keys")
        return {key: entry[key] for key in self.keys}


# The encoder of a worker process, made once by its initializer: a tokenizer is too costly to send with each
# batch.
_worker: list[Encoder] = []


def start_worker(args: Namespace, keys: tuple[str, ...]) -> None:
    """Make this process's encoder. Interrupts are the parent's to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _worker[:] = [Encoder(build_tokenizer(args), keys, args.append_eod)]


def encode_batch(pieces: Sequence[Piece]) -> EncodedBatch:
    """Encode in a worker process."""
    encoded = [_worker[0].encode(piece) for piece in pieces]
    documents = [document for document in encoded if document]
    tokens = sum(len(ids) for document in documents for ids in document.values())
    return EncodedBatch(documents, len(encoded) - len(documents), tokens, pieces[-1].position)
