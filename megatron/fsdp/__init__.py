"""Fully sharded data parallelism: a DDP replacement and a per-module `fully_shard`. Imports torch only."""

from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from megatron.fsdp.api import fully_shard, register_fsdp_forward_method
from megatron.fsdp.grouping import DataParallelPlacement
from megatron.fsdp.meta import reset_parameters_by_unit
from megatron.fsdp.module import FSDPModule, UnshardHandle
from megatron.fsdp.optimizer import bind_optimizer
from megatron.fsdp.precision import MixedPrecisionPolicy
from megatron.fsdp.shard_info import Chunk, Location
from megatron.fsdp.strategy import OuterStrategy, ShardingStrategy
from megatron.fsdp.wrapper import FSDPConfig, FullyShardedDataParallel, data_parallel_placement

__all__ = [
    "CPUOffloadPolicy",
    "Chunk",
    "DataParallelPlacement",
    "FSDPConfig",
    "FSDPModule",
    "FullyShardedDataParallel",
    "Location",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OuterStrategy",
    "ShardingStrategy",
    "UnshardHandle",
    "bind_optimizer",
    "data_parallel_placement",
    "fully_shard",
    "register_fsdp_forward_method",
    "reset_parameters_by_unit",
]
