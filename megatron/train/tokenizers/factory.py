"""From --tokenizer-type and its companions to a tokenizer: the one table of types."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from megatron.train.tokenizers.base import Tokenizer
from megatron.train.tokenizers.hugging_face import GPT2BPETokenizer, HuggingFaceTokenizer
from megatron.train.tokenizers.sentence_piece import SentencePieceTokenizer
from megatron.train.tokenizers.simple import ByteLevelTokenizer, NullTokenizer
from megatron.train.tokenizers.tik_token import TikTokenizer


def _sentence_piece(name: str, add_bos: bool = False) -> Callable[[Any], Tokenizer]:
    return lambda args: SentencePieceTokenizer(_get(args, "tokenizer_model"), name, add_bos)


_BUILDERS: dict[str, Callable[[Any], Tokenizer]] = {
    "SentencePieceTokenizer": _sentence_piece("SentencePieceTokenizer"),
    "GPTSentencePieceTokenizer": _sentence_piece("GPTSentencePieceTokenizer"),
    "Llama2Tokenizer": _sentence_piece("Llama2Tokenizer", add_bos=True),
    "HuggingFaceTokenizer": lambda args: HuggingFaceTokenizer(_get(args, "tokenizer_model")),
    "GPT2BPETokenizer": lambda args: GPT2BPETokenizer(_get(args, "vocab_file"), _get(args, "merge_file")),
    "TikTokenizer": lambda args: TikTokenizer(
        _get(args, "tokenizer_model"),
        _get(args, "tiktoken_pattern"),
        _get(args, "tiktoken_num_special_tokens"),
        _get(args, "tiktoken_special_tokens"),
        _get(args, "vocab_size"),
    ),
    "ByteLevelTokenizer": lambda args: ByteLevelTokenizer(),
    "NullTokenizer": lambda args: NullTokenizer(
        _get(args, "vocab_size"), _get(args, "null_tokenizer_eod_id"), _get(args, "null_tokenizer_pad_id")
    ),
}
# Shorter spellings that users of other tools type.
_ALIASES = {"ByteLevel": "ByteLevelTokenizer", "TikTokenTokenizer": "TikTokenizer"}

TOKENIZER_TYPES: tuple[str, ...] = tuple(_BUILDERS)


def build_tokenizer(args: Any) -> Tokenizer:
    """Build the tokenizer that ``args`` describe.

    Args:
        args: anything with Megatron's attribute names: tokenizer_type, tokenizer_model, vocab_file,
            merge_file, vocab_size, tiktoken_*, null_tokenizer_*. Absent ones count as None.

    Raises:
        ValueError: unknown type, missing or wrong file; names the flag, the value and the fix.
    """
    wanted = _get(args, "tokenizer_type")
    if not wanted:
        raise ValueError(f"--tokenizer-type is missing: pass one of {', '.join(TOKENIZER_TYPES)}")
    builder = _BUILDERS.get(_ALIASES.get(wanted, wanted))
    if builder is None:
        close = get_close_matches(wanted, TOKENIZER_TYPES, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ValueError(
            f"--tokenizer-type {wanted} is not built here: {hint}choose one of {', '.join(TOKENIZER_TYPES)}"
        )
    return builder(args)


def _get(args: Any, name: str) -> Any:
    return getattr(args, name, None)
