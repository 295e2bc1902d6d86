"""HSDP and HFSDP against single-process autograd, deferral, and other options of the wrapper."""

from __future__ import annotations

import functools

import pytest

from megatron.fsdp.strategy import OuterStrategy, ShardingStrategy, placements
from tests.pool import run_ranks
from tests.unit.fsdp.models import assert_same, oracle
from tests.unit.fsdp.test_wrapper import OPTIMIZERS, STRATEGIES, build, train

STEPS = 2
Z3 = ShardingStrategy.OPTIM_GRADS_PARAMS.value


def cells():
    """(kind, tied, strategy, outer size, outer strategy, reshard after forward, deferred), microbatches."""
    for index, strategy in enumerate(STRATEGIES):
        kind = "fused" if index % 2 else "plain"
        yield (kind, bool(index % 2), strategy, 2, "no_shard", True, False), 3
        yield (kind, not index % 2, strategy, 1, "no_shard", False, True), 3
        yield ("fused", False, strategy, 4, "no_shard", True, True), 1
    yield ("fused", True, Z3, 2, "optim", True, False), 3
    yield ("plain", False, Z3, 2, "optim", False, True), 2
    yield ("fused", False, Z3, 4, "optim", True, False), 2


def run_cells(rank, world_size, chosen, optimizer):
    return [train(rank, world_size, case, microbatches, STEPS, optimizer) for case, microbatches in chosen]


@pytest.mark.parametrize(
    "optimizer, part",
    [
        ("sgd", "cover"),
        pytest.param("sgd", "all", marks=pytest.mark.full),
        pytest.param("adamw", "all", marks=pytest.mark.full),
    ],
)
def test_hybrid_equals_one_rank(optimizer, part):
    """2 x 2, 4 x 1 and flat, deferred or not: what one process computes, on every rank (G06, G07, G16, G22).

    The cover has every strategy, every mesh, deferral and both outer strategies once or twice.
    """
    chosen = list(cells())
    if part == "cover":
        chosen = [chosen[index] for index in (0, 4, 8, 9, 10, 12, 13)]
    truths = {}
    for (kind, tied, *_), microbatches in chosen:
        key = (kind, tied, microbatches)
        if key not in truths:
            truths[key] = oracle(
                functools.partial(build, kind, tied), 4, microbatches, STEPS, OPTIMIZERS[optimizer]
            )
    for traces in run_ranks(run_cells, 4, chosen, optimizer, timeout=120):
        for (case, microbatches), trace in zip(chosen, traces, strict=True):
            assert_same(
                trace, truths[case[0], case[1], microbatches], 1e-9 if optimizer == "adamw" else 1e-11
            )


def test_outer_optim_needs_sharded_parameters():
    """HFSDP is ZeRO-3 inside; the error names both flags."""
    with pytest.raises(ValueError, match=r"--outer-dp-sharding-strategy optim needs .* not optim_grads"):
        placements(ShardingStrategy.OPTIM_GRADS, OuterStrategy.OPTIM, 2, 2)


def test_unknown_names():
    """An unknown strategy lists the known ones."""
    with pytest.raises(ValueError, match="no_shard, optim, optim_grads, optim_grads_params"):
        ShardingStrategy.parse("zero3")
