"""Gradients 1, 10, 100, 1000 over four microbatches give 1111, although forwards run ahead of backwards."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.fsdp import FSDPConfig, FullyShardedDataParallel, ShardingStrategy
from megatron.fsdp.gradients import GroupGradients
from megatron.fsdp.wrapper import data_parallel_placement
from megatron.models.backends.torch.linear import Linear
from megatron.parallel.mesh import ParallelMesh, ParallelSizes
from megatron.parallel.pipeline.actions import Compute, Kind, PipelineShape
from megatron.parallel.pipeline.executor import ExecutorOptions, PipelineExecutor, StageFunctions
from megatron.parallel.pipeline.lower import lower
from megatron.parallel.pipeline.p2p import Channel, Message, TensorSpec
from megatron.parallel.pipeline.schedules import make_schedule
from megatron.train.pipeline_runner import PendingWeightGradients
from tests.pool import run_ranks
from tests.unit.train.test_equivalence import pairwise_cover

COUNT, WIDTH = 4, 3
AXES = (
    (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1), ("zero-bubble", 2)),
    ("once", "twice", "tied"),
    (False, True),
    (False, True),
)
"""(schedule, chunks), uses of the weight, recompute, fused."""
COVER = pairwise_cover(AXES)


class Layer(nn.Module):
    """The identity, at first; every gradient of its weight is the gradient of its output."""

    def __init__(self, fused: bool, delayed: bool) -> None:
        super().__init__()
        self.linear = Linear(
            WIDTH, WIDTH, bias=False, fuse_wgrad_accumulation=fused, delay_wgrad_compute=delayed
        )
        with torch.no_grad():
            self.linear.weight.copy_(torch.eye(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Stage(nn.Module):
    """One layer, or the same weight used twice: by one layer or by two that are tied."""

    def __init__(self, uses: str, recompute: bool, fused: bool, delayed: bool) -> None:
        super().__init__()
        self.first = Layer(fused, delayed)
        self.second = Layer(fused, delayed) if uses == "tied" else None
        if self.second is not None:
            self.second.linear.weight = self.first.linear.weight
        self.uses, self.recompute = uses, recompute

    def forward(self, x: Tensor) -> Tensor:
        calls = [self.first] if self.uses == "once" else [self.first, self.second or self.first]
        for layer in calls:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return x


def poison(monkey: pytest.MonkeyPatch) -> None:
    """Fill temporary gradient buffers, where overwrite is granted, with NaN."""
    plain = GroupGradients._new_full

    def filled(self: GroupGradients, dtype: torch.dtype) -> Tensor:
        buffer = plain(self, dtype)
        return buffer.fill_(float("nan")) if self.group.placements.gradients_sharded else buffer

    monkey.setattr(GroupGradients, "_new_full", filled)


def functions_of(chunk: FullyShardedDataParallel, last: bool) -> StageFunctions:
    def forward(microbatch: int, inputs: Message) -> Tensor:
        out = chunk(inputs[0] if inputs else torch.ones(1, WIDTH))
        return (out * 10.0**microbatch).sum() if last else out

    pending = PendingWeightGradients([module for module in chunk.modules() if isinstance(module, Linear)])

    @contextlib.contextmanager
    def flags(action: Compute) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if action.microbatch < COUNT - 1:
                stack.enter_context(chunk.no_sync())
            if action.kind is Kind.INPUT:
                stack.enter_context(pending.counting(action.microbatch))
            yield

    return StageFunctions(forward, pending.compute, flags)


def run_cells(rank: int, world: int, cells: list[tuple]) -> list[list[list[float]]]:
    mesh = ParallelMesh(ParallelSizes(pipeline=2, data=2))
    placement = data_parallel_placement(mesh.device_mesh("fsdp"))
    group = mesh.group("pp")
    assert group is not None
    channel = Channel(group, torch.device("cpu"))
    with pytest.MonkeyPatch.context() as monkey:
        poison(monkey)
        return [run_cell(cell, mesh.rank("pp"), placement, channel) for cell in cells]


def run_cell(cell: tuple, rank: int, placement: Callable, channel: Channel) -> list[list[float]]:
    strategy, (schedule, chunks), uses, recompute, fused = cell
    shape = PipelineShape(2, COUNT, chunks)
    config = FSDPConfig(strategy=ShardingStrategy(strategy))
    delayed = schedule == "zero-bubble"
    stages = {
        stage: FullyShardedDataParallel(Stage(uses, recompute, fused, delayed), config, placement, (Layer,))
        for stage in shape.stages_of(rank)
    }
    executor = PipelineExecutor(
        lower(make_schedule(schedule, shape), shape)[rank],
        shape,
        rank,
        {stage: functions_of(chunk, stage == shape.num_stages - 1) for stage, chunk in stages.items()},
        channel,
        ExecutorOptions(lambda _stage, _microbatch: (TensorSpec((1, WIDTH), torch.float32),)),
    )
    found = []
    for _ in range(2):
        for chunk in stages.values():
            chunk.zero_grad_buffer()
        executor.run()
        for chunk in stages.values():
            chunk.finish_grad_sync()
            found += [parameter.grad.full_tensor().unique().tolist() for parameter in chunk.parameters()]
    return found


@pytest.mark.parametrize("rest", [False, pytest.param(True, marks=pytest.mark.full)], ids=["cover", "rest"])
@pytest.mark.parametrize("strategy", [strategy.value for strategy in ShardingStrategy])
def test_the_sum_of_all_microbatches(strategy: str, rest: bool) -> None:
    """Rule 1 and 2 of the main_grad contract under pipelines: tied, called twice, recomputed, delayed, fused or not."""
    cells = [(strategy, *cell) for cell in itertools.product(*AXES) if (cell not in COVER) == rest]
    for results in run_ranks(run_cells, 4, cells, timeout=120):
        for cell, found in zip(cells, results, strict=True):
            expected = [1111.0] if cell[2] == "once" else [2222.0]
            assert found and all(values == expected for values in found), (cell, found)
