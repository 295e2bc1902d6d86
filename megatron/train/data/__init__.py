"""Data: configuration, GPT samples on megatron-core's datasets, and iterators that resume.

The whole interface: ``data_config_from_args``, ``build_data_iterators`` and ``DataIterators`` (iterators.py
says how batches look and what is saved), ``unigram_entropy`` and ``validate_data`` (checks before a model is
built). Importing this package does not import megatron.core; building iterators does.
"""

from megatron.train.data.build import build_data_iterators, validate_data
from megatron.train.data.config import DataConfig, data_config_from_args
from megatron.train.data.entropy import unigram_entropy
from megatron.train.data.iterators import DataIterator, DataIterators

__all__ = [
    "DataConfig",
    "DataIterator",
    "DataIterators",
    "build_data_iterators",
    "data_config_from_args",
    "unigram_entropy",
    "validate_data",
]
