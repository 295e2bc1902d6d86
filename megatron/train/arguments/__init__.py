"""Command-line flags with Megatron-LM's names: as data, parsed, validated (docs/flags.md)."""

from megatron.train.arguments.batch import BatchSchedule, batch_schedule
from megatron.train.arguments.flag import Flag
from megatron.train.arguments.model import model_config_from
from megatron.train.arguments.parse import parse_args
from megatron.train.arguments.resolve import padded_vocabulary
from megatron.train.arguments.validate import validate
from megatron.train.config import TrainConfig

__all__ = [
    "BatchSchedule",
    "Flag",
    "TrainConfig",
    "batch_schedule",
    "model_config_from",
    "padded_vocabulary",
    "parse_args",
    "validate",
]
