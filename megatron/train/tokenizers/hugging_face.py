"""Tokenizers of the Hugging Face ``tokenizers`` library, offline: tokenizer.json, and GPT-2's BPE files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.train.tokenizers.base import Tokenizer, digest, missing_package, require_file

# Ends of documents by convention, tried in this order where no configuration beside tokenizer.json names one.
_EOD_TOKENS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|eot_id|>", "<EOD>", "[SEP]")


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json, or the folder that holds one (--tokenizer-model). Never asks the network.

    The end of a document is the eos_token of tokenizer_config.json or special_tokens_map.json beside it, else
    the first known one in the vocabulary. A folder without tokenizer.json goes through ``transformers``, if
    that is installed.

    Args:
        model: --tokenizer-model.
        add_special_tokens: let the tokenizer's template add its special tokens to every text (Megatron: off).

    Raises:
        ValueError: no file, not a tokenizer, or no end of document.
    """

    name = "HuggingFaceTokenizer"

    def __init__(self, model: str | None, add_special_tokens: bool = False) -> None:
        path = require_file("--tokenizer-model", model, "a tokenizer.json or its folder", self.name)
        self._add_special_tokens = add_special_tokens
        folder = path if path.is_dir() else path.parent
        self._path = path / "tokenizer.json" if path.is_dir() else path
        if self._path.is_file():
            self._tokenizer = _load_json(self._path, self.name)
        else:
            self._tokenizer = _convert_with_transformers(folder)
        # Ids may have holes: the size that holds every id counts, not the number of entries.
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        special = _special_tokens(folder)
        self.eod = self._find_eod(special.get("eos_token"))
        self.bos = self._optional_id(special.get("bos_token"))
        self.pad = self._optional_id(special.get("pad_token"))

    def _optional_id(self, token: str | None) -> int | None:
        return None if token is None else self._tokenizer.token_to_id(token)

    def _find_eod(self, named: str | None) -> int:
        for token in (named, *_EOD_TOKENS):
            found = self._optional_id(token)
            if found is not None:
                return found
        raise ValueError(
            f"--tokenizer-model {self._path} names no end of document: put a tokenizer_config.json with an "
            "eos_token "
            "beside it"
        )

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of ``text``."""
        return self._tokenizer.encode(text, add_special_tokens=self._add_special_tokens).ids

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def _file_identity(self) -> dict[str, object]:
        return digest(self._path) if self._path.is_file() else {}


class GPT2BPETokenizer(Tokenizer):
    """GPT-2's byte-level BPE from vocab.json (--vocab-file) and merges.txt (--merge-file).

    Raises:
        ValueError: a missing or unreadable file, or no <|endoftext|> in the vocabulary.
    """

    name = "GPT2BPETokenizer"

    def __init__(self, vocab_file: str | None, merge_file: str | None) -> None:
        self._vocab = require_file("--vocab-file", vocab_file, "GPT-2's vocab.json", self.name)
        self._merges = require_file("--merge-file", merge_file, "GPT-2's merges.txt", self.name)
        try:
            from tokenizers import Tokenizer as Backend
            from tokenizers import decoders, models, pre_tokenizers
        except ImportError:
            raise missing_package("tokenizers", self.name) from None
        try:
            model = models.BPE.from_file(str(self._vocab), str(self._merges))
        except Exception as error:
            raise ValueError(
                f"--vocab-file {vocab_file} and --merge-file {merge_file} are not a GPT-2 vocabulary "
                f"({_first_line(error)}); pass the vocab.json and merges.txt of one model"
            ) from None
        self._tokenizer = Backend(model)
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = decoders.ByteLevel()
        self.vocab_size = max(self._tokenizer.get_vocab().values()) + 1
        end = self._tokenizer.token_to_id("<|endoftext|>")
        if end is None:
            raise ValueError(
                f"--vocab-file {vocab_file} has no <|endoftext|>, which ends documents: add it to the file"
            )
        self.eod = end

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of ``text``."""
        return self._tokenizer.encode(text).ids

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``."""
        return self._tokenizer.decode([int(i) for i in ids if i != self.eod])

    def _file_identity(self) -> dict[str, object]:
        return digest(self._vocab, self._merges)


def _load_json(path: Path, name: str) -> Any:
    try:
        from tokenizers import Tokenizer as Backend
    except ImportError:
        raise missing_package("tokenizers", name) from None
    try:
        return Backend.from_file(str(path))
    except Exception as error:
        raise ValueError(
            f"--tokenizer-model {path} is not a Hugging Face tokenizer.json ({_first_line(error)}); pass "
            "that file or "
            "its folder, or the --tokenizer-type that fits this file"
        ) from None


def _convert_with_transformers(folder: Path) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ValueError(
            f"--tokenizer-model {folder} holds no tokenizer.json; pass a folder with one, or pip install "
            "transformers to "
            "have its other formats converted"
        ) from None
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True).backend_tokenizer
    except Exception as error:
        raise ValueError(
            f"--tokenizer-model {folder} holds no tokenizer that transformers can read "
            f"({_first_line(error)}); pass a "
            "folder with a tokenizer.json"
        ) from None


def _special_tokens(folder: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        path = folder / file
        if not path.is_file():
            continue
        try:
            entries = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is not JSON ({_first_line(error)}); fix or remove it") from None
        for key in ("eos_token", "bos_token", "pad_token"):
            value = entries.get(key)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[key] = text
    return found


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:120]
