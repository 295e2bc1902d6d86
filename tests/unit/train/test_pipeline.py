"""Training through a pipeline under FSDP equals one plain process (parallelism.md, "One truth")."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from typing import Any

import pytest
import torch

from megatron.fsdp import ShardingStrategy
from megatron.parallel.pipeline.stages import StageRequest
from tests.pool import RankError, run_ranks
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
        dp=case.dp, layers=case.layers, counts=case.counts, lengths=case.lengths,
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
    whole = pipeline_runs.initial_weights(case)
    for name, tensor in assemble([trace.initial for trace in traces], whole).items():  # P11, P19
        rows = equivalence.VOCABULARY if torch.isnan(tensor).any() else len(tensor)
        assert torch.equal(tensor[:rows], whole[name][:rows]), f"{name} does not start alike"
    for step, (close, true) in enumerate(zip(reference.gradients, exact.gradients, strict=True)):
        gradients = assemble([trace.gradients[step] for trace in traces], true)
        compare(gradients, close, true, tolerance)
    weights = assemble([trace.weights for trace in traces], exact.weights)
    compare(weights, reference.weights, exact.weights, tolerance)
    return traces


# The schedules, each with the pipelines that it is for: (pp, chunks).
PIPELINES = {
    "gpipe": ((2, 1), (4, 1), (2, 2), (4, 2)),
    "1f1b": ((2, 1), (4, 1)),
    "interleaved": ((2, 2), (4, 2)),
    "zero-bubble": ((2, 1), (2, 2), (4, 1), (4, 2)),
}
COUNTS = (3, 1, 4, 6, 2)
"""Microbatches, step by step: fewer than ranks, as many, and more, none of them a rule's number."""
AXES: dict[str, tuple[Any, ...]] = {
    "schedule": tuple(PIPELINES),
    "strategy": tuple(strategy.value for strategy in ShardingStrategy),
    "dp": (1, 2),
    "tied": (True, False),
    "fused": (True, False),
    "recompute": (False, True),
    "per_token": (False, True),
    "optimizer": ("sgd", "adam"),
    "keep_gathered": (False, True),
}
COVER = pairwise_cover(list(AXES.values()))


def case_of(cell: tuple[Any, ...], pp: int, chunks: int, **changes: Any) -> PipeCase:
    layers = {2: 3, 4: 5, 8: 9}[pp * chunks]  # never even
    return PipeCase(pp=pp, chunks=chunks, layers=layers, **{**dict(zip(AXES, cell, strict=True)), **changes})


def covering_cases() -> list[PipeCase]:
    """Every pair of values, every pipeline; data-parallel ranks beside two pipeline ranks only: four are enough."""
    turns = {schedule: itertools.cycle(pipelines) for schedule, pipelines in PIPELINES.items()}
    cases = []
    for cell in COVER:
        pp, chunks = next(turns[cell[0]])
        few = {"dp": 1} if pp == 4 else {}
        cases.append(case_of(cell, pp, chunks, counts=COUNTS, **few))
    return cases


@pytest.mark.parametrize("case", covering_cases(), ids=str)
def test_a_pipeline_equals_plain_torch(case: PipeCase) -> None:
    """P02, P03, P04, P08, P10, P11, P18, P19, P20: uneven stages, another number of microbatches in each step."""
    check(case)


def all_cases() -> list[PipeCase]:
    """Every pipeline with every pair of the other values, 1 to 3 pp microbatches, so many in a run as it has steps."""
    found = []
    for schedule, pipelines in PIPELINES.items():
        for (pp, chunks), cell in itertools.product(pipelines, COVER):
            for first in range(1, 3 * pp + 1, pipeline_runs.STEPS):
                counts = tuple(range(first, min(first + pipeline_runs.STEPS, 3 * pp + 1)))
                found.append(case_of((schedule, *cell[1:]), pp, chunks, counts=counts))
    return found


@pytest.mark.full
@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_a_pipeline_equals_plain_torch_everywhere(case: PipeCase) -> None:
    check(case)


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
def test_stages_of_only_embedding_or_loss(request_: StageRequest) -> None:
    """P20: less microbatches than ranks too."""
    check(PipeCase(pp=4, layers=request_.num_layers, request=request_, counts=(5, 1, 2)))


def test_microbatches_of_different_lengths() -> None:
    """P05: gradients of 8, 12 and 8 tokens add up."""
    check(PipeCase(layers=3, microbatches=3, lengths=(8, 12, 8), per_token=True))


@pytest.mark.parametrize("how", ["raise", "exit"])
def test_a_rank_that_fails_in_the_middle_of_a_schedule_ends_all(how: str) -> None:
    """Each rank says where in the schedule it was: the failing one its stage and action, its peer what never came."""
    with pytest.raises(RankError) as caught:
        run_ranks(pipeline_runs.failing, 2, PipeCase(microbatches=4, layers=3), how, timeout=60)
    message = str(caught.value)
    missed = r"pipeline rank 0, (waiting for|posting) .*microbatch \d"
    assert re.search(missed, message), message
    if how == "raise":
        assert "pipeline rank 1, stage 1, forward of microbatch 2: RuntimeError: a fault" in message


@pytest.mark.parametrize(
    "case",
    [
        PipeCase(schedule="1f1b", strategy="optim_grads_params", dp=2, layers=3, counts=COUNTS),
        PipeCase(schedule="zero-bubble", strategy="optim", dp=2, layers=3, counts=COUNTS),
        PipeCase(schedule="interleaved", strategy="optim_grads", chunks=2, layers=5, counts=COUNTS),
    ],
    ids=str,
)
def test_overlap_changes_no_bit(case: PipeCase) -> None:
    """P08, P17: losses, norms and every weight, with messages and reductions overlapped or not."""
    both = [case, dataclasses.replace(case, overlap=False)]
    for one, other in run_ranks(pipeline_runs.train_each, case.world, both, timeout=120):
        assert one.losses == other.losses and one.norms == other.norms
        for name, pieces in one.weights.items():
            for (_, ours), (_, theirs) in zip(pieces, other.weights[name], strict=True):
                assert torch.equal(ours, theirs), name
