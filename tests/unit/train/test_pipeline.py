"""Training through a pipeline under FSDP equals one plain process (parallelism.md, "One truth")."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch

from megatron.fsdp import ShardingStrategy
from megatron.parallel.pipeline.stages import StageRequest
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


def compare(ours: Tensors, reference: Tensors, exact: Tensors, tolerance: float, slack: float = 2.0) -> None:
    """Hold each tensor to the tolerance, or to `slack` times what plain fp32 itself is away from float64."""
    for name, tensor in ours.items():
        rows = equivalence.VOCABULARY if torch.isnan(tensor).any() else len(tensor)  # padding is nobody's
        assert not torch.isnan(tensor[:rows]).any(), f"no rank holds all of {name}"
        rounding = error(reference[name][:rows], exact[name][:rows])
        measured = error(tensor[:rows], reference[name][:rows])
        assert measured < max(tolerance, slack * rounding), f"{name}: {measured}, fp32 rounding {rounding}"


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


PRODUCT = ("pipeline", "strategy", "microbatches", "tied", "recompute")


@pytest.mark.full
@pytest.mark.parametrize("cell", list(itertools.product(*(AXES[axis] for axis in PRODUCT))), ids=str)
def test_a_pipeline_equals_plain_torch_everywhere(cell: tuple[Any, ...]) -> None:
    values = dict(zip(PRODUCT, cell, strict=True))
    check(case_of(tuple(values.get(axis, AXES[axis][0]) for axis in AXES)))


@pytest.mark.parametrize(
    "case",
    [
        PipeCase(tp=2, dp=2, microbatches=3, layers=3, fused=True),
        PipeCase(cp=2, tp=2, microbatches=2, layers=3, tied=False, schedule="zero-bubble", per_token=True),
        PipeCase(dp=4, outer=2, microbatches=3, layers=5, chunks=2, schedule="interleaved"),
        PipeCase(
            tp=2, cp=2, pp=2, dp=1, microbatches=2, layers=4, strategy="optim", chunks=2, schedule="gpipe"
        ),
    ],
    ids=str,
)
def test_all_axes_together(case: PipeCase) -> None:
    """Tensor x pipeline x context x data, hybrid sharding: F12, P13, P18."""
    check(case)


@pytest.mark.parametrize(
    "request_",
    [
        StageRequest(2, count_embedding=True, count_loss=True),  # embedding | layer | layer | loss
        StageRequest(3, layout="E|tt|t|L"),
        StageRequest(5, first_rank=1, last_rank=2),
    ],
    ids=str,
)
@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_stages_of_only_embedding_or_loss(request_: StageRequest, microbatches: int) -> None:
    """P20: less microbatches than ranks too."""
    check(PipeCase(pp=4, layers=request_.num_layers, request=request_, microbatches=microbatches))


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_overlap_changes_no_bit(schedule: str, strategy: str) -> None:
    """P08, P17: losses, norms and every weight, with messages and reductions overlapped or not."""
    runs = [
        run_ranks(pipeline_runs.train, 4, PipeCase(
            schedule=schedule, strategy=strategy, dp=2, microbatches=3, layers=3, overlap=overlap
        ), timeout=120)
        for overlap in (True, False)
    ]  # fmt: skip
    for one, other in zip(*runs, strict=True):
        assert one.losses == other.losses and one.norms == other.norms
        for name, pieces in one.weights.items():
            for (_, ours), (_, theirs) in zip(pieces, other.weights[name], strict=True):
                assert torch.equal(ours, theirs), name


def test_initial_weights_do_not_depend_on_the_pipeline() -> None:
    """P11, P19: tied copies are drawn alike; no parameter is missing."""
    case = PipeCase(chunks=2, schedule="interleaved", layers=5, microbatches=1)
    traces = run_ranks(pipeline_runs.train, 2, case, timeout=120)
    whole = pipeline_runs.initial_weights(case)
    initial = assemble([trace.initial for trace in traces], whole)
    for name, tensor in initial.items():
        rows = equivalence.VOCABULARY if torch.isnan(tensor).any() else len(tensor)
        assert torch.equal(tensor[:rows], whole[name][:rows]), name
