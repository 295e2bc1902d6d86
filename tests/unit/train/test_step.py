"""One training step on plain parts: modes of the loss, decisions that all ranks take alike."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.parallel.mesh import ParallelMesh, ParallelSizes
from megatron.train.errors import RunStopped
from megatron.train.evaluate import evaluate
from megatron.train.loss_scale import LossScaleConfig, LossScaler
from megatron.train.lr_schedule import OptimizerParamScheduler, ScheduleConfig
from megatron.train.optimizer import OptimizerConfig, build_optimizer
from megatron.train.step import BatchSize, StepOptions, StepResult, TrainState, TrainStep, masked_loss
from tests.pool import run_ranks


class Replicated(nn.Module):
    """The smallest data-parallel model: one weight per token id, gradients averaged (or summed) over ranks."""

    def __init__(self, divisor: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.1, 0.8, 8))
        self.divisor = divisor
        self.calls: list[str] = []

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.weight[tokens] * labels

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.calls.append("no_sync")
        yield

    def finish_grad_sync(self) -> None:
        self.calls.append("finish")
        if dist.is_initialized():
            dist.all_reduce(self.weight.grad)
        self.weight.grad /= self.divisor

    def zero_grad_buffer(self) -> None:
        self.weight.grad = None

    def scale_gradients(self, factor: float) -> None:
        self.weight.grad *= factor


def make_step(
    mesh: ParallelMesh, scaler: LossScaleConfig | None = None, **options: Any
) -> tuple[TrainStep, Replicated]:
    divisor = 1 if options.get("per_token") else mesh.size("dp")
    model = Replicated(divisor)
    optimizer = build_optimizer(
        model.named_parameters(), OptimizerConfig(kind="sgd", lr=1.0, momentum=0.0, weight_decay=0.0)
    )
    schedule = OptimizerParamScheduler(optimizer, ScheduleConfig(max_lr=1.0, decay_style="constant"))
    state = TrainState(model, optimizer, schedule, LossScaler(scaler or LossScaleConfig()))
    return TrainStep(state, mesh, StepOptions(**{"clip_grad": 0.0, **options})), model


def batch(tokens: list[int], mask: list[float], labels: float = 1.0) -> dict[str, Tensor]:
    ids = torch.tensor([tokens])
    return {"tokens": ids, "labels": torch.full(ids.shape, labels), "loss_mask": torch.tensor([mask])}


def test_masked_loss() -> None:
    total, valid = masked_loss(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
    assert (total.item(), valid.item()) == (8.0, 3.0)


def test_microbatches_are_synchronised_once() -> None:
    step, model = make_step(ParallelMesh.single())
    step(iter([batch([0], [1.0])] * 3), BatchSize(3, 3))
    assert model.calls == ["no_sync", "no_sync", "finish"]


@pytest.mark.parametrize("cut", [1, 2])
def test_per_token_loss_does_not_depend_on_the_cut(cut: int) -> None:
    """P04: 7 and 1 valid tokens, as one microbatch or as two; the mean of means does depend on it."""
    rows = [([0, 1, 2, 3, 4, 5, 6, 7], [1.0] * 7 + [0.0]), ([0] * 8, [1.0] + [0.0] * 7)]
    batches = [batch(*row) for row in rows]
    if cut == 1:
        batches = [{key: torch.cat([one[key] for one in batches]) for key in batches[0]}]
    step, model = make_step(ParallelMesh.single(), per_token=True)
    before = model.weight.detach().clone()
    result = step(iter(batches), BatchSize(len(batches), 2))
    expected = torch.tensor([2.0, 1, 1, 1, 1, 1, 1, 0]) / 8
    torch.testing.assert_close(before - model.weight.detach(), expected)
    assert result.num_tokens == 8
    assert result.loss == pytest.approx((before[:7].sum() + before[0]).item() / 8)


def test_mean_mode_is_a_mean_of_means() -> None:
    """P04"""
    step, model = make_step(ParallelMesh.single())
    before = model.weight.detach().clone()
    rows = [([0, 1, 2, 3], [1.0, 1, 1, 1]), ([0, 1, 2, 3], [1.0, 0, 0, 0])]
    result = step(iter([batch(*row) for row in rows]), BatchSize(2, 2))
    torch.testing.assert_close(
        before - model.weight.detach(), torch.tensor([0.625, 0.125, 0.125, 0.125, 0, 0, 0, 0])
    )
    assert result.loss == pytest.approx((before[:4].mean() + before[0]).item() / 2)


@pytest.mark.parametrize("per_token", [False, True])
def test_a_batch_without_valid_tokens_is_zero(per_token: bool) -> None:
    """X02"""
    step, model = make_step(ParallelMesh.single(), per_token=per_token)
    before = model.weight.detach().clone()
    result = step(iter([batch([0, 1], [0.0, 0.0])]), BatchSize(1, 1))
    assert (result.loss, result.grad_norm, result.skipped) == (0.0, 0.0, False)
    assert torch.equal(before, model.weight.detach())


def test_clipping_scales_to_the_norm() -> None:
    step, model = make_step(ParallelMesh.single(), clip_grad=0.5)
    before = model.weight.detach().clone()
    result = step(iter([batch([2], [1.0], labels=4.0)]), BatchSize(1, 1))
    assert result.grad_norm == pytest.approx(4.0)
    assert (before - model.weight.detach()).norm().item() == pytest.approx(0.5, rel=1e-5)


def test_zeros_are_counted() -> None:
    step, _ = make_step(ParallelMesh.single(), count_zeros=True)
    assert step(iter([batch([2, 3], [1.0, 1.0])]), BatchSize(1, 1)).num_zeros == 6


def test_loss_scale_leaves_no_trace_and_backs_off() -> None:
    scale = LossScaleConfig(initial=8.0, dynamic=True, hysteresis=1)
    step, model = make_step(ParallelMesh.single(), scale)
    before = model.weight.detach().clone()
    result = step(iter([batch([2], [1.0])]), BatchSize(1, 1))
    assert (result.grad_norm, result.loss_scale) == (1.0, 8.0)
    assert (before - model.weight.detach())[2].item() == pytest.approx(1.0)
    overflow = step(iter([batch([2], [1.0], labels=math.inf)]), BatchSize(1, 1))
    assert overflow.skipped
    assert step.scaler.scale == 4.0


def poisoned(rank: int, world: int, stop: bool) -> tuple[StepResult | str, list[float], int, list[str]]:
    """Rank 1's second microbatch has an infinite loss."""
    step, model = make_step(ParallelMesh(ParallelSizes(data=world)), stop_at_nan=stop)
    before = model.weight.detach().clone()
    bad = math.inf if rank == 1 else 1.0
    batches = iter([batch([0], [1.0]), batch([3], [1.0], labels=bad)])
    result: StepResult | str
    try:
        result = step(batches, BatchSize(2, 4), stop_requested=rank == 2)
    except RunStopped as error:
        result = str(error)
    changed = (model.weight.detach() - before).tolist()
    return result, changed, step.schedule.num_samples, model.calls


@pytest.mark.parametrize("world", [2, 3])
def test_a_bad_number_on_one_rank_stops_all(world: int) -> None:
    """X06: the message names rank and parameter; parameters are untouched everywhere."""
    messages = set()
    for result, changed, samples, _ in run_ranks(poisoned, world, True):
        assert isinstance(result, str)
        messages.add(result)
        assert (changed, samples) == ([0.0] * 8, 0)
    (message,) = messages
    assert "rank 1, microbatch 1" in message
    assert "the gradient of weight (rank 0) is not finite" in message
    assert "--no-check-for-nan-in-loss-and-grad" in message


@pytest.mark.parametrize("world", [2, 3])
def test_a_bad_number_on_one_rank_is_skipped_by_all(world: int) -> None:
    """X06, G02: a skip is counted, never a silent update of zero; a wish to stop travels in the same collective."""
    for result, changed, samples, _ in run_ranks(poisoned, world, False):
        assert isinstance(result, StepResult)
        assert result.skipped and not math.isfinite(result.loss)
        assert (changed, samples) == ([0.0] * 8, 0)
        assert result.stop_requested == (world == 3)


def one_step(rank: int, world: int, per_token: bool) -> tuple[StepResult, Tensor]:
    step, model = make_step(ParallelMesh(ParallelSizes(data=world)), per_token=per_token)
    rows = [([0, 1, 2, 3], [1.0] * (rank + 1) + [0.0] * (3 - rank))]
    return step(iter([batch(*row) for row in rows]), BatchSize(1, world)), model.weight.detach()


@pytest.mark.parametrize("per_token", [False, True])
def test_ranks_with_unequal_tokens(per_token: bool) -> None:
    """G21: the loss is the same number on all ranks, by each mode's rule."""
    weight = torch.linspace(0.1, 0.8, 8)
    results = run_ranks(one_step, 3, per_token)
    sums = [weight[: rank + 1].sum().item() for rank in range(3)]
    expected = sum(sums) / 6 if per_token else sum(s / (r + 1) for r, s in enumerate(sums)) / 3
    assert len({(result.loss, result.grad_norm) for result, _ in results}) == 1
    assert results[0][0].loss == pytest.approx(expected)
    assert results[0][0].num_tokens == 6
    for _, changed in results:
        assert torch.equal(changed, results[0][1])


def evaluation(rank: int, world: int, count: int) -> tuple[float, int, bool]:
    """The same 12 samples of 1 to 4 valid tokens, however many ranks and microbatches share them."""
    mesh = ParallelMesh(ParallelSizes(data=world))
    _, model = make_step(mesh)
    model.train()
    samples = [batch([i % 8] * 4, [1.0] * (1 + i % 4) + [0.0] * (3 - i % 4)) for i in range(12)]
    per_batch = 12 // (world * count)
    batches = []
    for m in range(count):
        own = samples[(m * world + rank) * per_batch :][:per_batch]
        batches.append({key: torch.cat([one[key] for one in own]) for key in own[0]})
    result = evaluate(model, batches, mesh)
    return result.loss, result.num_tokens, model.training


def test_evaluation_does_not_depend_on_the_cut() -> None:
    """P03: neither on microbatches nor on ranks; the model goes back to training."""
    results = [run_ranks(evaluation, world, count) for world, count in ((1, 1), (1, 4), (2, 3), (3, 2))]
    flat = [outcome for ranks in results for outcome in ranks]
    assert {(round(loss, 6), tokens, training) for loss, tokens, training in flat} == {
        (round(flat[0][0], 6), 30, True)
    }


def test_perplexity() -> None:
    from megatron.train.evaluate import EvaluationResult

    assert EvaluationResult(2.0, 1).perplexity == pytest.approx(math.exp(2.0))
    assert EvaluationResult(1e9, 1).perplexity == pytest.approx(math.exp(20.0))
