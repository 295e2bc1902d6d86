"""Fill-in-the-middle: documents whose middle comes last, so that a model learns to infill (--fim-data).

https://arxiv.org/abs/2207.14255. A document (a sample's tokens between two ends of document) is taken with probability
`rate`: its text is cut at two random characters, and each part tokenised for itself. In prefix-suffix-middle order it
becomes <prefix> prefix <suffix> suffix <middle> middle; with probability `spm_rate` <prefix> <suffix> suffix
<middle> prefix middle. Samples keep their length: what grows over the end is cut off, what is missing is padding.

The draws of a sample depend on the seed and its number alone: any rank, worker or resumed run makes the same sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


class TextTokenizer(Protocol):
    """What is needed of a tokenizer."""

    eod: int

    def tokenize(self, text: str) -> list[int]: ...
    def detokenize(self, ids: list[int]) -> str: ...


@dataclass(frozen=True)
class FillInTheMiddle:
    """What becomes of samples.

    Attributes:
        rate, spm_rate: see the top of this module.
        prefix, middle, suffix: ids of the three marks.
        split_token: id that parts a document into fragments, each taken with probability `fragment_rate`; None: never.
        no_prefix: documents that begin with this text stay.
    """

    tokenizer: TextTokenizer
    rate: float
    spm_rate: float
    prefix: int
    middle: int
    suffix: int
    seed: int
    split_token: int | None = None
    fragment_rate: float | None = None
    no_prefix: str | None = None

    def apply(self, tokens: np.ndarray, number: int) -> np.ndarray:
        """The tokens of sample `number`, at most as many as came; ends of document stay."""
        draw = np.random.default_rng((self.seed, number))
        pieces: list[int] = []
        documents = _split(tokens, self.tokenizer.eod)
        for index, document in enumerate(documents):
            if index:
                pieces.append(self.tokenizer.eod)
            if self.split_token is None or self.fragment_rate is None:
                pieces += self._maybe(document, self.rate, draw)
                continue
            for part, fragment in enumerate(_split(document, self.split_token)):
                pieces += [self.split_token] if part else []
                pieces += self._maybe(fragment, self.fragment_rate, draw)
        return np.asarray(pieces[: len(tokens)], dtype=tokens.dtype)

    def _maybe(self, tokens: np.ndarray, rate: float, draw: np.random.Generator) -> list[int]:
        if len(tokens) == 0 or draw.random() >= rate:
            return tokens.tolist()
        text = self.tokenizer.detokenize(tokens.tolist())
        if self.no_prefix is not None and text.startswith(self.no_prefix):
            return tokens.tolist()
        first, last = sorted(draw.integers(0, len(text) + 1, size=2).tolist())
        parts = (text[:first], text[first:last], text[last:])
        prefix, middle, suffix = (self.tokenizer.tokenize(part) if part else [] for part in parts)
        if draw.random() < self.spm_rate:
            return [self.prefix, self.suffix, *suffix, self.middle, *prefix, *middle]
        return [self.prefix, *prefix, self.suffix, *suffix, self.middle, *middle]


def _split(tokens: np.ndarray, mark: int) -> list[np.ndarray]:
    """The runs between marks, empty ones too."""
    runs = np.split(tokens, np.flatnonzero(tokens == mark))
    return [runs[0], *(run[1:] for run in runs[1:])]


def fill_in_the_middle(args: Any, tokenizer: TextTokenizer) -> FillInTheMiddle | None:
    """What --fim-data and its flags ask for; None without.

    Raises ValueError, naming the flag, for a rate that is no probability or a mark that is not one token.
    """
    if not getattr(args, "fim_data", False):
        return None
    for name in ("fim_rate", "fim_spm_rate", "fim_fragment_rate"):
        value = getattr(args, name)
        if value is not None and not 0.0 <= value <= 1.0:
            raise ValueError(f"--{name.replace('_', '-')} {value}: give a number from 0 to 1")

    def mark(name: str) -> int:
        text = getattr(args, name)
        ids = tokenizer.tokenize(text)
        if len(ids) != 1:
            raise ValueError(
                f"--{name.replace('_', '-')} {text} is {len(ids)} tokens for this tokenizer: add it as a special one"
            )
        return ids[0]

    return FillInTheMiddle(
        tokenizer,
        rate=args.fim_rate,
        spm_rate=args.fim_spm_rate,
        prefix=mark("fim_prefix_token"),
        middle=mark("fim_middle_token"),
        suffix=mark("fim_suffix_token"),
        seed=args.seed,
        split_token=None if args.fim_split_sample is None else mark("fim_split_sample"),
        fragment_rate=args.fim_fragment_rate,
        no_prefix=args.fim_no_prefix,
    )
