"""Sharding strategies: which of parameters, gradients and optimizer state is sharded over which axis.

This is the only module that names strategies. Everything else asks a `Placements` record, made once at
construction, whether something is replicated, partial or sharded.

The strategies are the stages of ZeRO (Rajbhandari et al., 2020, https://arxiv.org/abs/1910.02054) with the names
of Megatron-FSDP's `--data-parallel-sharding-strategy`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class ShardingStrategy(str, Enum):
    """Strategy over the inner (shard) data-parallel axis.

    - `NO_SHARD`: everything replicated, gradients all-reduced (DDP).
    - `OPTIM`: optimizer state sharded (ZeRO-1).
    - `OPTIM_GRADS`: optimizer state and gradients sharded (ZeRO-2).
    - `OPTIM_GRADS_PARAMS`: optimizer state, gradients and parameters sharded (ZeRO-3).
    """

    NO_SHARD = "no_shard"
    OPTIM = "optim"
    OPTIM_GRADS = "optim_grads"
    OPTIM_GRADS_PARAMS = "optim_grads_params"

    @classmethod
    def parse(cls, value: str | ShardingStrategy) -> ShardingStrategy:
        """Return the strategy called `value`; ValueError lists the names."""
        try:
            return cls(value)
        except ValueError:
            names = ", ".join(strategy.value for strategy in cls)
            raise ValueError(
                f"--data-parallel-sharding-strategy {value!r} is not known; use one of: {names}"
            ) from None


class OuterStrategy(str, Enum):
    """Strategy over the outer data-parallel axis (HSDP: `NO_SHARD`, HFSDP: `OPTIM`)."""

    NO_SHARD = "no_shard"
    OPTIM = "optim"

    @classmethod
    def parse(cls, value: str | OuterStrategy) -> OuterStrategy:
        """Return the outer strategy called `value`; ValueError lists the names."""
        try:
            return cls(value)
        except ValueError:
            names = ", ".join(strategy.value for strategy in cls)
            raise ValueError(
                f"--outer-dp-sharding-strategy {value!r} is not known; use one of: {names}"
            ) from None


@dataclass(frozen=True)
class Placements:
    """What is sharded, decided once for a parameter group on its mesh.

    Attributes:
        parameters_sharded: compute parameters are gathered for use and released after it.
        gradients_sharded: every microbatch's gradient goes into a temporary buffer that is reduced at once.
            Otherwise the full gradient accumulates in a persistent buffer that is reduced once a step. On a mesh of
            size 1 there is nothing to reduce, and the persistent buffer saves a copy.
        optimizer_sharded: the optimizer sees this rank's rows only.
        outer_sharded: optimizer state is sharded over the outer axis too (HFSDP).
        parameters_released: storage of compute parameters is released between uses. False on a mesh of size 1,
            where there is nothing to gather.
    """

    parameters_sharded: bool
    gradients_sharded: bool
    optimizer_sharded: bool
    outer_sharded: bool
    parameters_released: bool


_TABLE: dict[ShardingStrategy, tuple[bool, bool, bool]] = {
    # strategy: (parameters, gradients, optimizer) sharded over the inner axis
    ShardingStrategy.NO_SHARD: (False, False, False),
    ShardingStrategy.OPTIM: (False, False, True),
    ShardingStrategy.OPTIM_GRADS: (False, True, True),
    ShardingStrategy.OPTIM_GRADS_PARAMS: (True, True, True),
}


def placements(
    strategy: ShardingStrategy,
    outer: OuterStrategy = OuterStrategy.NO_SHARD,
    inner_size: int = 1,
    outer_size: int = 1,
) -> Placements:
    """Return the `Placements` of `strategy` on a mesh of `inner_size` x `outer_size` ranks.

    Raises:
        ValueError: the outer axis shards what the inner axis keeps whole.
    """
    parameters, gradients, optimizer = _TABLE[strategy]
    outer_sharded = outer is OuterStrategy.OPTIM and outer_size > 1
    if outer_sharded and strategy is not ShardingStrategy.OPTIM_GRADS_PARAMS:
        raise ValueError(
            f"--outer-dp-sharding-strategy optim needs --data-parallel-sharding-strategy optim_grads_params, not "
            f"{strategy.value}: use optim_grads_params, or --outer-dp-sharding-strategy no_shard"
        )
    return Placements(
        parameters_sharded=parameters,
        gradients_sharded=gradients and (inner_size > 1 or outer_sharded),
        optimizer_sharded=optimizer,
        outer_sharded=outer_sharded,
        parameters_released=parameters and (inner_size > 1 or outer_sharded),
    )
