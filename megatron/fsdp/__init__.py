"""Fully sharded data parallelism: a DDP replacement and a per-module `fully_shard`. Imports torch only."""

from megatron.fsdp.grouping import DataParallelPlacement
from megatron.fsdp.optimizer import bind_optimizer
from megatron.fsdp.precision import MixedPrecisionPolicy
from megatron.fsdp.sharded_parameter import Chunk, Location
from megatron.fsdp.strategy import OuterStrategy, ShardingStrategy
from megatron.fsdp.wrapper import FSDPConfig, FullyShardedDataParallel, data_parallel_placement

__all__ = [
    "Chunk",
    "DataParallelPlacement",
    "FSDPConfig",
    "FullyShardedDataParallel",
    "Location",
    "MixedPrecisionPolicy",
    "OuterStrategy",
    "ShardingStrategy",
    "bind_optimizer",
    "data_parallel_placement",
]
