"""From the validated configuration to the model's."""

from __future__ import annotations

from megatron.models.config import ModelConfig
from megatron.train.arguments.resolve import padded_vocabulary
from megatron.train.config import TrainConfig


def model_config_from(config: TrainConfig, vocab_size: int | None = None) -> ModelConfig:
    """The model that the flags describe.

    vocab_size: the tokenizer's size, where --vocab-size was not given. Raises ValueError naming the flag.
    """
    size = vocab_size if config.vocab_size is None else config.vocab_size
    if size is None:
        raise ValueError("--vocab-size is missing: give it, or a tokenizer that knows its size")
    padded = padded_vocabulary(size, config)
    return ModelConfig.from_arguments(config.replace(vocab_size=size, padded_vocab_size=padded))
