#!/usr/bin/env python3
"""Recipe of data/shakespeare_spm_2k.model: trains a SentencePiece BPE model on the shipped corpus.

Usage, from the root of the repository:  python data/train_sentencepiece.py [--vocab-size 2048] [--output
PREFIX]

The choices: byte fallback (no text is ever unknown), identity normalisation and no whitespace squeezing
(tokens give the text back exactly, line ends included), ids unk 0, bos 1, eos 2 (used as end of document),
pad 3.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent


def paragraphs(corpus: Path) -> Iterator[str]:
    """Yield the corpus in pieces short enough for the trainer, line ends kept."""
    with gzip.open(corpus, "rt", encoding="utf-8") as lines:
        for line in lines:
            text = json.loads(line)["text"]
            for start in range(0, len(text), 2000):
                yield text[start : start + 2000]


def main() -> None:
    """Train and write PREFIX.model."""
    import sentencepiece

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, default=HERE / "shakespeare.jsonl.gz")
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--output", type=Path, default=HERE / "shakespeare_spm_2k")
    arguments = parser.parse_args()
    with open(f"{arguments.output}.model", "wb") as model:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=paragraphs(arguments.corpus),
            model_writer=model,
            model_type="bpe",
            vocab_size=arguments.vocab_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            user_defined_symbols=["\n"],
            max_sentence_length=16384,
            character_coverage=1.0,
            pad_id=3,
            num_threads=1,
            minloglevel=1,
        )
    print(f"wrote {arguments.output}.model")


if __name__ == "__main__":
    main()
