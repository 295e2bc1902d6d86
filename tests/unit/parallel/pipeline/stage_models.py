"""Small stages for pipeline tests, and what each rank of a test does. Imported by the workers."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.parallel.pipeline.actions import Compute, PipelineShape
from megatron.parallel.pipeline.executor import (
    ExecutorOptions,
    PipelineError,
    PipelineExecutor,
    StageFunctions,
)
from megatron.parallel.pipeline.lower import lower
from megatron.parallel.pipeline.p2p import Channel, Message, Receive, Send, TensorSpec
from megatron.parallel.pipeline.schedules import forward_only, make_schedule

WIDTH = 6


@dataclass(frozen=True)
class Pipe:
    """One case. `lengths`: rows of each microbatch; `tensors`: of a message."""

    schedule: str = "1f1b"
    num_microbatches: int = 4
    num_chunks: int = 1
    lengths: tuple[int, ...] = ()
    headers: bool = False
    overlap: bool = True
    dtype: torch.dtype = torch.float32
    timeout_seconds: float = 30.0
    fail: str = ""  # "raise", "exit" or "stall", in stage 1's forward of microbatch 1
    pairs: bool = False  # messages of hidden states and ids

    def length(self, microbatch: int) -> int:
        return self.lengths[microbatch] if self.lengths else 5


def layer(stage: int, dtype: torch.dtype) -> nn.Linear:
    generator = torch.Generator().manual_seed(stage)
    linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float32)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / WIDTH**0.5)
    return linear.to(dtype)


def sample(case: Pipe, microbatch: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 + microbatch)
    return torch.randn(case.length(microbatch), WIDTH, generator=generator).to(case.dtype)


def loop(case: Pipe, num_stages: int) -> tuple[list[float], list[Tensor]]:
    """The plain loop: losses of the microbatches, gradients of all stages' weights."""
    layers = [layer(stage, case.dtype) for stage in range(num_stages)]
    losses = []
    for microbatch in range(case.num_microbatches):
        hidden = sample(case, microbatch)
        for one in layers:
            hidden = torch.tanh(one(hidden))
        loss = hidden.float().square().mean()
        loss.backward()
        losses.append(loss.item())
    return losses, [parameter.grad for one in layers for parameter in one.parameters()]


class Stage:
    """One layer, as the executor calls it; stage 1 can be made to fail."""

    def __init__(self, case: Pipe, stage: int, last: bool, losses: list[float]) -> None:
        self.case, self.stage, self.last, self.losses = case, stage, last, losses
        self.layer = layer(stage, case.dtype)

    def forward(self, microbatch: int, inputs: Message) -> Tensor | Message:
        if self.stage == 1 and microbatch == 1:
            self.fail()
        hidden = inputs[0] if inputs else sample(self.case, microbatch)
        if self.case.pairs and inputs:
            assert inputs[1].tolist() == [microbatch] and not inputs[1].requires_grad
        hidden = torch.tanh(self.layer(hidden))
        if self.last:
            loss = hidden.float().square().mean()
            self.losses.append(loss.item())
            return loss
        return (hidden, torch.tensor([microbatch])) if self.case.pairs else hidden

    def fail(self) -> None:
        if self.case.fail == "raise":
            raise RuntimeError("boom")
        if self.case.fail == "value":
            raise ValueError("too long")
        if self.case.fail == "exit":
            os._exit(9)
        if self.case.fail == "stall":
            time.sleep(4 * self.case.timeout_seconds)


def run_pipe(rank: int, world: int, case: Pipe, evaluate: bool = False) -> dict[str, Any]:
    """Run one program; what it recorded, the losses and the gradients of this rank's stages."""
    shape = PipelineShape(world, case.num_microbatches, case.num_chunks)
    orders = forward_only(shape) if evaluate else make_schedule(case.schedule, shape)
    losses: list[float] = []
    last = shape.num_stages - 1
    stages = {stage: Stage(case, stage, stage == last, losses) for stage in shape.stages_of(rank)}
    channel = None
    if world > 1:
        group = dist.group.WORLD
        assert group is not None
        timeout = timedelta(seconds=case.timeout_seconds)
        channel = Channel(group, torch.device("cpu"), with_headers=case.headers, timeout=timeout)

    def specs(_stage: int, microbatch: int) -> tuple[TensorSpec, ...]:
        hidden = TensorSpec((case.length(microbatch), WIDTH), case.dtype)
        return (hidden, TensorSpec((1,), torch.int64)) if case.pairs else (hidden,)

    executor = PipelineExecutor(
        lower(orders, shape)[rank],
        shape,
        rank,
        {stage: StageFunctions(one.forward) for stage, one in stages.items()},
        channel,
        ExecutorOptions(specs, overlap=case.overlap, with_gradients=not evaluate),
    )
    executor.run()
    gradients = [parameter.grad for one in stages.values() for parameter in one.layer.parameters()]
    return {
        "recorded": tuple(executor.recorded),
        "order": orders[rank],
        "peak": executor.peak_in_flight,
        "losses": losses,
        "stages": tuple(stages),
        "gradients": gradients,
    }


def send_all_dtypes(rank: int, world: int, dtypes: list[torch.dtype], headers: bool) -> list[Any]:
    """Rank 0 sends one message of each dtype to rank 1 and gets it back; asynchronous, in one batch."""
    group = dist.group.WORLD
    assert group is not None
    channel = Channel(group, torch.device("cpu"), with_headers=headers)
    values = [torch.arange(-3, 9).reshape(3, 4).to(dtype) for dtype in dtypes]
    values += [torch.zeros(0, 4), torch.tensor(3.0)]
    specs = [TensorSpec.of(value) for value in values]
    if rank == 0:
        channel.post([Send(1, (value,)) for value in values]).wait()
        posted = channel.post([Receive(1, (spec,)) for spec in specs])
    else:
        posted = channel.post([Receive(0, (spec,)) for spec in specs])
    posted.wait()
    assert posted.is_over()
    received = [message[0] for message in posted.received if message is not None]
    if rank == 1:
        channel.post([Send(0, (value,)) for value in received]).wait()
    return [
        (tensor.dtype, tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).tolist())
        for tensor in received
    ]


def first_wrong(recorded: tuple[Compute, ...], order: tuple[Compute, ...]) -> str:
    return next(
        (f"{ours} for {theirs}" for ours, theirs in zip(recorded, order, strict=True) if ours != theirs), ""
    )


def run_and_note_errors(rank: int, world: int, case: Pipe, directory: str) -> None:
    """Run; leave the error and the seconds that it took in a file, then fail as a real rank does."""
    start = time.monotonic()
    try:
        run_pipe(rank, world, case)
    except PipelineError as error:
        path = Path(directory) / f"rank{rank}.txt"
        path.with_suffix(".tmp").write_text(f"{time.monotonic() - start}\n{error}")
        path.with_suffix(".tmp").rename(path)
        os._exit(3)
