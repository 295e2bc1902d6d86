"""Training through a pipeline under FSDP equals one plain process (parallelism.md, "One truth")."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from megatron.fsdp import ShardingStrategy
from tests.pool import run_ranks
from tests.unit.train import equivalence, pipeline_runs
from tests.unit.train.equivalence import Trace, error
from tests.unit.train.pipeline_runs import Piece, PipeCase, RankTrace
from tests.unit.train.test_equivalence import pairwise_cover

Tensors = dict[str, torch.Tensor]


@functools.cache
def expected(key: PipeCase, total: int, dtype: torch.dtype) -> tuple[Trace, tuple[float, int]]:
    return equivalence.reference(key, total, dtype), pipeline_runs.evaluation_reference(key)


def plain(case: PipeCase) -> PipeCase:
    """What the reference depends on."""
    return PipeCase(
        microbatches=case.microbatches, optimizer=case.optimizer, per_token=case.per_token, tied=case.tied,
        dp=case.dp, layers=case.layers,
    )  # fmt: skip


def assemble(held: list[dict[str, list[Piece]]], like: Tensors) -> Tensors:
    """The whole model from what all ranks hold; replicas must be equal bit for bit (P08, P13)."""
    whole = {name: torch.full_like(tensor, float("nan")) for name, tensor in like.items()}
    for of_rank in held:
        for name, pieces in of_rank.items():
            for offsets, values in pieces:
                place = whole[name]
                for dim, (start, size) in enumerate(zip(offsets, values.shape, strict=True)):
                    place = place.narrow(dim, start, size)
                if not torch.isnan(place).all():
                    assert torch.equal(place, values), f"replicas of {name} differ"
                place.copy_(values)
    return whole


def compare(ours: Tensors, reference: Tensors, exact: Tensors, tolerance: float) -> None:
    for name, tensor in ours.items():
        rows = equivalence.VOCABULARY if torch.isnan(tensor).any() else len(tensor)  # padding is nobody's
        assert not torch.isnan(tensor[:rows]).any(), f"no rank holds all of {name}"
        rounding = error(reference[name][:rows], exact[name][:rows])
        measured = error(tensor[:rows], reference[name][:rows])
        assert measured < max(tolerance, 2 * rounding), f"{name}: {measured}, fp32 rounding {rounding}"


def check(case: PipeCase) -> list[RankTrace]:
    reference, evaluation = expected(plain(case), case.dp, case.dtype)
    exact, _ = expected(plain(case), case.dp, torch.float64)
    tolerance = 1e-9 if case.optimizer == "adam" else 1e-6
    traces: list[RankTrace] = run_ranks(pipeline_runs.train, case.world, case, timeout=120)
    for trace in traces:
        assert trace.losses == pytest.approx(reference.losses, rel=tolerance)
        assert trace.norms == pytest.approx(reference.norms, rel=tolerance)
        assert trace.evaluation == pytest.approx(evaluation, rel=tolerance)
        assert trace.recorded_as_planned
    for step in range(pipeline_runs.STEPS):
        gradients = assemble([trace.gradients[step] for trace in traces], exact.gradients[step])
        compare(gradients, reference.gradients[step], exact.gradients[step], tolerance)
    weights = assemble([trace.weights for trace in traces], exact.weights)
    compare(weights, reference.weights, exact.weights, tolerance)
    return traces


# Every schedule with the pipelines it is for: (schedule, pp, chunks).
PIPELINES = (
    ("gpipe", 2, 1), ("gpipe", 2, 2), ("1f1b", 2, 1), ("1f1b", 4, 1), ("interleaved", 2, 2),
    ("interleaved", 4, 2), ("zero-bubble", 2, 1), ("zero-bubble", 2, 2), ("zero-bubble", 4, 1),
)  # fmt: skip
AXES: dict[str, tuple[Any, ...]] = {
    "pipeline": PIPELINES,
    "strategy": tuple(strategy.value for strategy in ShardingStrategy),
    "dp": (1, 2),
    "microbatches": (1, 3, 4, 6),
    "tied": (True, False),
    "fused": (True, False),
    "recompute": (False, True),
    "per_token": (False, True),
    "optimizer": ("sgd", "adam"),
    "keep_gathered": (False, True),
}
COVER = pairwise_cover(list(AXES.values()))


def case_of(cell: tuple[Any, ...]) -> PipeCase:
    values = dict(zip(AXES, cell, strict=True))
    schedule, pp, chunks = values.pop("pipeline")
    layers = {2: 3, 4: 5, 8: 9}[pp * chunks]  # never even
    return PipeCase(schedule=schedule, pp=pp, chunks=chunks, layers=layers, **values)


@pytest.mark.parametrize("cell", COVER, ids=str)
def test_a_pipeline_equals_plain_torch(cell: tuple[Any, ...]) -> None:
    """P02, P03, P04, P08, P10, P18, P19, P20 over every pair of values; uneven stages, less microbatches than ranks."""
    check(case_of(cell))
