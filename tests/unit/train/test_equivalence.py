"""Losses, main gradients, norms and weights do not depend on the layout (parallelism.md, "One truth").

1, 2, 3 and 4 ranks x every strategy x fused and unfused x 1 and 3 microbatches x 5 SGD or AdamW steps x
mean and per-token loss x tied and untied models. The default run covers every pair of values; --full runs
the whole product. Covers G01, G02, G03, G06, G07, G08, G10, G19, G20, G21, G23, F11, F16.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from megatron.fsdp import ShardingStrategy
from tests.pool import run_ranks
from tests.unit.train import equivalence
from tests.unit.train.equivalence import Case, Trace, error

STRATEGIES = tuple(strategy.value for strategy in ShardingStrategy)
AXES: dict[str, tuple[Any, ...]] = {
    "world": (1, 2, 3, 4),
    "strategy": STRATEGIES,
    "fused": (True, False),
    "microbatches": (1, 3),
    "optimizer": ("sgd", "adam"),
    "per_token": (False, True),
    "tied": (True, False),
}


def pairwise_cover(axes: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Cells in which every pair of values of two axes occurs; greedy, the same in every run."""
    cells = list(itertools.product(*axes))
    pairs = {
        cell: {(i, cell[i], j, cell[j]) for i, j in itertools.combinations(range(len(axes)), 2)}
        for cell in cells
    }
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        best = max(cells, key=lambda cell: len(pairs[cell] & missing))
        chosen.append(best)
        missing -= pairs[best]
    return chosen


COVER = pairwise_cover(list(AXES.values()))
REST = [cell for cell in itertools.product(*AXES.values()) if cell not in COVER]


@functools.cache
def expected(world: int, case: Case, dtype: torch.dtype) -> Trace:
    return equivalence.reference(case, world, dtype)


def check(world: int, case: Case) -> None:
    plain = Case(
        microbatches=case.microbatches, optimizer=case.optimizer, per_token=case.per_token, tied=case.tied
    )
    reference, exact = expected(world, plain, case.dtype), expected(world, plain, torch.float64)
    tolerance = 1e-9 if case.optimizer == "adam" else 1e-6
    for trace in run_ranks(equivalence.train, world, case):
        assert trace.losses == pytest.approx(reference.losses, rel=tolerance)
        assert trace.norms == pytest.approx(reference.norms, rel=tolerance)
        for ours, close, true in zip(trace.gradients, reference.gradients, exact.gradients, strict=True):
            compare(ours, close, true, tolerance)
        compare(trace.weights, reference.weights, exact.weights, tolerance)


Tensors = dict[str, torch.Tensor]


def compare(ours: Tensors, reference: Tensors, exact: Tensors, tolerance: float) -> None:
    """Hold each tensor to the tolerance.

    Gradients of norms are small sums of large terms: where plain fp32 itself is half the tolerance away
    from float64, another order of summation may be twice as far away from plain fp32.
    """
    assert ours.keys() == reference.keys()
    for name in ours:
        rounding = error(reference[name], exact[name])
        measured = error(ours[name], reference[name])
        assert measured < max(tolerance, 2 * rounding), f"{name}: {measured}, fp32 rounding {rounding}"


def test_the_cover_is_one() -> None:
    assert len(COVER) < 30
    for i, j in itertools.combinations(range(len(AXES)), 2):
        values = list(AXES.values())
        assert {(cell[i], cell[j]) for cell in COVER} == set(itertools.product(values[i], values[j]))


@pytest.mark.parametrize("cell", COVER, ids=str)
def test_training_equals_plain_torch(cell: tuple[Any, ...]) -> None:
    values = dict(zip(AXES, cell, strict=True))
    check(values.pop("world"), Case(**values))


@pytest.mark.full
@pytest.mark.parametrize("cell", REST, ids=str)
def test_training_equals_plain_torch_everywhere(cell: tuple[Any, ...]) -> None:
    values = dict(zip(AXES, cell, strict=True))
    check(values.pop("world"), Case(**values))


@pytest.mark.parametrize("microbatches", [1, 3])
def test_hybrid_sharding_equals_plain_torch(microbatches: int) -> None:
    """G06, G07, G08: two replicas of two shards; the outer reduction happens once, for all microbatches."""
    check(4, Case(microbatches=microbatches, outer=2))


@pytest.mark.parametrize(
    "case",
    [
        Case(strategy, fused, 3, optimizer, tied=tied, per_token=tied)
        for strategy, fused, optimizer, tied in (
            ("optim_grads_params", True, "sgd", True),
            ("optim_grads", False, "adam", False),
            ("optim", True, "adam", True),
            ("no_shard", False, "sgd", False),
        )
    ],
    ids=str,
)
def test_delayed_weight_gradients_change_no_bit(case: Case) -> None:
    """Without a pipeline each backward's are computed after it, in all strategies, fused and not, tied and not."""
    plain = run_ranks(equivalence.train, 2, case)[0]
    delayed = run_ranks(equivalence.train, 2, dataclasses.replace(case, delay=True))[0]
    assert delayed.losses == plain.losses and delayed.norms == plain.norms
    for ours, theirs in zip(
        [*delayed.gradients, delayed.weights], [*plain.gradients, plain.weights], strict=True
    ):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
