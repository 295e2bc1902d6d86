"""Tokenizers behind one small protocol (base.Tokenizer), chosen by --tokenizer-type (factory.py)."""

from megatron.train.tokenizers.base import Tokenizer, padded_vocab_size
from megatron.train.tokenizers.factory import TOKENIZER_TYPES, build_tokenizer

__all__ = ["TOKENIZER_TYPES", "Tokenizer", "build_tokenizer", "padded_vocab_size"]
