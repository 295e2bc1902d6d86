"""Bubbles of pipeline schedules, measured: stages sleep instead of computing, so that no core is needed.

    python benchmarks/pipeline.py [--ranks 4] [--microbatches 8] [--unit-ms 40]

Real processes, gloo, the real executor. A forward sleeps one unit, a backward two, each half of it one; with several
chunks on a rank each chunk's share of that. Prints the bubble that was measured beside the one on paper.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from megatron.parallel.pipeline.actions import Kind, PipelineShape
from megatron.parallel.pipeline.executor import ExecutorOptions, PipelineExecutor, StageFunctions
from megatron.parallel.pipeline.lower import COSTS, lower
from megatron.parallel.pipeline.p2p import Channel, Message, TensorSpec
from megatron.parallel.pipeline.schedules import make_schedule
from megatron.parallel.pipeline.simulator import simulate

CASES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1), ("zero-bubble", 2))
SHAPE = (16,)


@dataclass(frozen=True)
class Setting:
    """What one run measures. unit: seconds of a forward of all of a rank's chunks."""

    ranks: int
    microbatches: int
    unit: float
    repeats: int


class _SleepingStage(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_seconds)
        return gradient, None, None


def stage_functions(stage: int, shape: PipelineShape, setting: Setting, split: bool) -> StageFunctions:
    """A stage that sleeps."""
    unit = setting.unit / shape.num_chunks
    backward = unit * (COSTS[Kind.INPUT] if split else COSTS[Kind.BACKWARD])

    def forward(_microbatch: int, inputs: Message) -> Tensor:
        x = inputs[0] if inputs else torch.ones(SHAPE, requires_grad=True)
        out = _SleepingStage.apply(x, unit * COSTS[Kind.FORWARD], backward)
        return out.sum() if stage == shape.num_stages - 1 else out

    return StageFunctions(forward, lambda _microbatch: time.sleep(unit * COSTS[Kind.WEIGHT]))


def measure(rank: int, setting: Setting, store: str, results: Any) -> None:
    """One rank: all cases, the fastest of the repeats of each."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=setting.ranks, init_method=f"file://{store}")
    group = dist.group.WORLD
    assert group is not None
    channel = Channel(group, torch.device("cpu"))
    for case in CASES:
        schedule, chunks = case
        shape = PipelineShape(setting.ranks, setting.microbatches, chunks)
        program = lower(make_schedule(schedule, shape), shape)[rank]
        functions = {
            stage: stage_functions(stage, shape, setting, schedule == "zero-bubble")
            for stage in shape.stages_of(rank)
        }
        options = ExecutorOptions(lambda _stage, _microbatch: (TensorSpec(SHAPE, torch.float32),))
        executor = PipelineExecutor(program, shape, rank, functions, channel, options)
        times = []
        for _ in range(setting.repeats):
            dist.barrier()
            start = time.monotonic()
            executor.run()
            dist.barrier()
            times.append(time.monotonic() - start)
        if rank == 0:
            results[case] = min(times)
    dist.barrier()
    os._exit(0)  # not through the destructors of communicators


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--unit-ms", type=float, default=40.0)
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    setting = Setting(options.ranks, options.microbatches, options.unit_ms / 1000, options.repeats)
    with multiprocessing.Manager() as manager, tempfile.TemporaryDirectory() as folder:
        results = manager.dict()
        multiprocessing.spawn(
            measure, (setting, str(Path(folder) / "store"), results), nprocs=setting.ranks, join=True
        )
        measured = dict(results)
    print(
        f"{setting.ranks} ranks, {setting.microbatches} microbatches, a forward sleeps {options.unit_ms:g} ms"
    )
    print("| schedule | chunks | step, ms | bubble, measured | bubble, on paper |\n|---|---|---|---|---|")
    for schedule, chunks in CASES:
        shape = PipelineShape(setting.ranks, setting.microbatches, chunks)
        report = simulate(lower(make_schedule(schedule, shape), shape), shape)
        seconds = measured[schedule, chunks]
        busy = sum(report.busy) / setting.ranks * setting.unit / chunks
        print(
            f"| {schedule} | {chunks} | {1000 * seconds:.0f} | {100 * (1 - busy / seconds):.1f} % | "
            f"{100 * report.bubble:.1f} % |"
        )


if __name__ == "__main__":
    main()
