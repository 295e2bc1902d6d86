"""tiktoken vocabularies (--tokenizer-type TikTokenizer) from a local file."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from pathlib import Path

from megatron.train.tokenizers.base import Tokenizer, digest, missing_package, require_file

# The split patterns that Megatron's --tiktoken-pattern names: v1 is Mistral's, v2 NVIDIA Nemotron's.
_PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
_SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")


class TikTokenizer(Tokenizer):
    """Special tokens first (ids 0..num_special - 1), then the byte pieces of the file, as in Megatron.

    Args:
        model: --tokenizer-model: tiktoken's own text format (base64 and rank per line) or Megatron's JSON
            list.
        pattern: --tiktoken-pattern, v1 or v2.
        num_special: --tiktoken-num-special-tokens.
        special: --tiktoken-special-tokens or None for the seven of Megatron; unnamed ones up to num_special
            are filler.
        size: --vocab-size: cut the vocabulary, specials included, to this size; None keeps the whole file.

    Raises:
        ValueError: no file, not such a file, or contradictory sizes.
    """

    name = "TikTokenizer"

    def __init__(
        self,
        model: str | None,
        pattern: str | None = None,
        num_special: int | None = None,
        special: Sequence[str] | None = None,
        size: int | None = None,
    ) -> None:
        self._path = require_file("--tokenizer-model", model, "a tiktoken vocabulary", self.name)
        try:
            import tiktoken
        except ImportError:
            raise missing_package("tiktoken", self.name) from None
        names, self._num_special = _special_names(special, 1000 if num_special is None else num_special)
        if (pattern or "v2") not in _PATTERNS:
            raise ValueError(f"--tiktoken-pattern {pattern}: choose one of {', '.join(_PATTERNS)}")
        pieces = _read_pieces(self._path)
        if size is not None:
            if size <= self._num_special + 255:
                raise ValueError(
                    f"--vocab-size {size} leaves no room for 256 bytes and {self._num_special} special "
                    "tokens: raise it "
                    "or lower --tiktoken-num-special-tokens"
                )
            pieces = pieces[: size - self._num_special]
        # tiktoken's ids begin at 0 here and are shifted by the special tokens on the way out and in.
        self._encoding = tiktoken.Encoding(
            name=self._path.name,
            pat_str=_PATTERNS[pattern or "v2"],
            mergeable_ranks={piece: rank for rank, piece in enumerate(pieces)},
            special_tokens={},
        )
        self.vocab_size = self._num_special + len(pieces)
        self.bos, self.eod, self.pad = names.index("<s>"), names.index("</s>"), names.index("<pad>")

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of ``text``."""
        return [token + self._num_special for token in self._encoding.encode_ordinary(text)]

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``."""
        return self._encoding.decode([int(i) - self._num_special for i in ids if i >= self._num_special])

    def _file_identity(self) -> dict[str, object]:
        return digest(self._path)


def _special_names(special: Sequence[str] | None, count: int) -> tuple[list[str], int]:
    names = list(special or _SPECIAL_TOKENS)
    missing = [token for token in ("<s>", "</s>", "<pad>") if token not in names]
    if missing or len(set(names)) != len(names):
        raise ValueError(
            f"--tiktoken-special-tokens {' '.join(names)}: it must hold <s>, </s> and <pad>, each token once"
        )
    if count < len(names):
        raise ValueError(
            f"--tiktoken-num-special-tokens {count}: it must be at least {len(names)}, the tokens with a name"
        )
    return names, count


def _read_pieces(path: Path) -> list[bytes]:
    """Return the byte pieces by rank."""
    try:
        if path.suffix == ".json":
            ranks = {
                int(entry["rank"]): base64.b64decode(entry["token_bytes"])
                for entry in json.loads(path.read_text())
            }
        else:
            lines = (line.split() for line in path.read_bytes().splitlines() if line)
            ranks = {int(rank): base64.b64decode(piece, validate=True) for piece, rank in lines}
    except (ValueError, KeyError, TypeError, binascii.Error) as error:
        raise ValueError(
            f"--tokenizer-model {path} is not a tiktoken vocabulary ({str(error)[:80]}); pass a .tiktoken "
            "file with base64 "
            "and rank per line, or a JSON list with rank and token_bytes"
        ) from None
    if sorted(ranks) != list(range(len(ranks))) or len(ranks) < 256:
        raise ValueError(
            f"--tokenizer-model {path} lacks ranks: it must hold every rank from 0 on, at least the 256 bytes"
        )
    return [ranks[rank] for rank in range(len(ranks))]
