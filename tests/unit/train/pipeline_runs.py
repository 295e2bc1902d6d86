"""Training runs through a pipeline, for test_pipeline.py. Imported by the workers."""

from __future__ import annotations

import dataclasses
import itertools
import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.models.backends.base import LayerOptions
from megatron.models.backends.torch import TorchBackend
from megatron.models.config import ModelConfig, RecomputeConfig
from megatron.models.gpt import GPTModel, StageParts
from megatron.models.init import Initializer, materialise
from megatron.parallel.annotate import annotation_of, local_chunks
from megatron.parallel.context.balance import split_batch
from megatron.parallel.mesh import ParallelMesh, ParallelSizes
from megatron.parallel.pipeline.schedules import make_schedule, peak_in_flight
from megatron.parallel.pipeline.stages import StageRequest, place_layers
from megatron.train.build import wrap_model
from megatron.train.evaluate import evaluate
from megatron.train.lr_schedule import OptimizerParamScheduler, ScheduleConfig
from megatron.train.optimizer import build_optimizer
from megatron.train.pipeline import PipelineModel, PipelinePlan
from megatron.train.step import BatchSize, StepOptions, TrainState, TrainStep
from tests.unit.train import equivalence
from tests.unit.train.equivalence import CLIP, LENGTH, MICRO_BATCH, SEED, Case, batch, whole

STEPS = equivalence.STEPS
Piece = tuple[tuple[int, ...], Tensor]
"""A part of a tensor of the whole model: where it begins, and its values."""


@dataclass(frozen=True)
class PipeCase(Case):
    """A pipeline; `outer` and the rest as in Case. `microbatches` are of each data-parallel rank; `counts`, in place of
    it, their numbers step by step. `lengths`: of the microbatches of a step, where they differ.
    """

    optimizer: str = "sgd"
    pp: int = 2
    chunks: int = 1
    schedule: str = "1f1b"
    dp: int = 1
    tp: int = 1
    cp: int = 1
    layers: int = 4
    recompute: bool = False
    request: StageRequest | None = None
    keep_gathered: bool = False
    overlap: bool = True
    counts: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()

    def batch(self, step: int, index: int) -> dict[str, Tensor]:
        one = batch(step, index)
        if not self.lengths:
            return one
        length = self.lengths[index // self.dp % len(self.lengths)]
        return {name: tensor[:, :length] for name, tensor in one.items()}

    def count(self, step: int) -> int:
        return self.counts[step % len(self.counts)] if self.counts else self.microbatches

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.tp * self.cp

    @property
    def model(self) -> ModelConfig:
        return super().model.replace(num_layers=self.layers)

    @property
    def stage_request(self) -> StageRequest:
        return self.request or StageRequest(self.layers)


@dataclass
class RankTrace:
    """What one rank saw: numbers of the model, pieces of its own parameters."""

    losses: list[float] = dataclasses.field(default_factory=list)
    norms: list[float] = dataclasses.field(default_factory=list)
    gradients: list[dict[str, list[Piece]]] = dataclasses.field(default_factory=list)
    weights: dict[str, list[Piece]] = dataclasses.field(default_factory=dict)
    initial: dict[str, list[Piece]] = dataclasses.field(default_factory=dict)
    recorded_as_planned: bool = True
    evaluation: tuple[float, int] = (0.0, 0)


def build(case: PipeCase) -> tuple[PipelineModel, ParallelMesh]:
    """The pipeline of this rank, wrapped as a real run wraps it."""
    sizes = ParallelSizes(
        tensor=case.tp, pipeline=case.pp, context=case.cp, data=case.dp, data_outer=case.outer
    )
    mesh = ParallelMesh(sizes)
    options = LayerOptions.from_mesh(
        mesh,
        sequence_parallel=case.tp > 1,
        params_dtype=case.dtype,
        device="meta",
        fuse_wgrad_accumulation=case.fused,
        delay_wgrad_compute=case.schedule == "zero-bubble",
    )
    backend = TorchBackend(options)
    model_config = case.model
    if case.recompute:
        model_config = model_config.replace(recompute=RecomputeConfig("full", "uniform", 1))
    config = equivalence.train_config(case, case.dp).replace(reshard_after_forward=not case.keep_gathered)
    plan = PipelinePlan(
        place_layers(case.stage_request, case.pp, case.chunks), case.schedule, overlap=case.overlap
    )
    chunks = {}
    for stage in plan.shape(case.pp, 1).stages_of(mesh.rank("pp")):
        held = plan.stages[stage]
        model = GPTModel(model_config, backend, mesh, StageParts(held.embedding, held.loss, held.layers))
        chunks[stage] = wrap_model(model, config, mesh, torch.device("cpu"))
    return PipelineModel(chunks, model_config, backend, mesh, plan), mesh


def local(case: PipeCase, mesh: ParallelMesh, one: dict[str, Tensor]) -> dict[str, Tensor]:
    """This context-parallel rank's part of a batch."""
    if case.cp == 1:
        return one
    positions = torch.arange(LENGTH).expand(MICRO_BATCH, LENGTH)
    return dict(split_batch({**one, "position_ids": positions}, case.cp, mesh.rank("cp")))


def pieces(name: str, tensor: Any, parameter: Tensor, mesh: ParallelMesh) -> list[Piece]:
    """Where the whole (over FSDP) tensor lies in the model. Collective over data-parallel ranks."""
    full, annotation = whole(tensor), annotation_of(parameter)
    axis = annotation.tensor_axis
    found = []
    for chunk in local_chunks(annotation, full.shape, mesh.rank(axis), mesh.size(axis)):
        part = full
        for dim, (start, size) in enumerate(zip(chunk.local_offsets, chunk.sizes, strict=True)):
            part = part.narrow(dim, start, size)
        found.append((chunk.global_offsets, part.clone()))
    return found


def train(rank: int, world: int, case: PipeCase) -> RankTrace:
    """STEPS steps of `case` on its ranks, and an evaluation before them."""
    model, mesh = build(case)
    optimizer = build_optimizer(model.named_parameters(), equivalence.optimizer_options(case))
    schedule = ScheduleConfig(
        max_lr=case.lr, decay_style="constant", start_weight_decay=0.1, end_weight_decay=0.1
    )
    state = TrainState(model, optimizer, OptimizerParamScheduler(optimizer, schedule))
    step = TrainStep(state, mesh, StepOptions(per_token=case.per_token, clip_grad=CLIP))
    named = list(model.named_parameters())
    trace = RankTrace()
    trace.initial = {name: pieces(name, parameter, parameter, mesh) for name, parameter in named}
    dp_rank = mesh.rank("dp")
    held_out = (local(case, mesh, batch(99, m * case.dp + dp_rank)) for m in range(3))
    result = evaluate(model, held_out, mesh)
    trace.evaluation = (result.loss, result.num_tokens)

    def record(*_: object) -> None:
        if len(trace.losses) in equivalence.RECORDED:
            trace.gradients.append({name: pieces(name, one.grad, one, mesh) for name, one in named})

    optimizer.register_step_pre_hook(record)
    for index in range(STEPS):
        count = case.count(index)
        planned = make_schedule(case.schedule, model.plan.shape(case.pp, count))[mesh.rank("pp")]
        own = (local(case, mesh, case.batch(index, m * case.dp + dp_rank)) for m in range(count))
        result_of_step = step(own, BatchSize(count, case.dp * count * MICRO_BATCH))
        trace.losses.append(result_of_step.loss)
        trace.norms.append(result_of_step.grad_norm)
        executor = model.runner.last_executor
        assert executor is not None
        trace.recorded_as_planned &= tuple(executor.recorded) == planned
        trace.recorded_as_planned &= executor.peak_in_flight == peak_in_flight(planned)
    trace.weights = {name: pieces(name, parameter, parameter, mesh) for name, parameter in named}
    return trace


def failing(rank: int, world: int, case: PipeCase, how: str) -> None:
    """Training in which the second stage fails in the forward of its third microbatch."""
    calls = itertools.count()
    forward = GPTModel.forward

    def faulty(*args: Any, **kwargs: Any) -> Tensor:
        if rank == 1 and torch.is_grad_enabled() and next(calls) == 2:
            if how == "exit":
                os._exit(9)
            raise RuntimeError("a fault")
        return forward(*args, **kwargs)

    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr(GPTModel, "forward", faulty)
        train(rank, world, case)


def train_each(rank: int, world: int, cases: list[PipeCase]) -> list[RankTrace]:
    """Several runs, one after the other."""
    return [train(rank, world, case) for case in cases]


def evaluation_reference(case: PipeCase) -> tuple[float, int]:
    """Mean loss over valid tokens of the held-out batches, by the plain model."""
    mesh = ParallelMesh.single()
    options = LayerOptions.from_mesh(mesh, params_dtype=case.dtype, device="meta")
    model = materialise(GPTModel(case.model, TorchBackend(options), mesh), Initializer(SEED, mesh))
    total, tokens = 0.0, 0
    with torch.no_grad():
        for index in range(3 * case.dp):
            one = batch(99, index)
            losses = model(one["tokens"], labels=one["labels"])
            total += float((losses.double() * one["loss_mask"].double()).sum())
            tokens += int(one["loss_mask"].sum())
    return total / tokens, tokens


def initial_weights(case: PipeCase) -> dict[str, Tensor]:
    """What one rank starts from."""
    mesh = ParallelMesh.single()
    options = LayerOptions.from_mesh(mesh, params_dtype=case.dtype, device="meta")
    model = materialise(GPTModel(case.model, TorchBackend(options), mesh), Initializer(SEED, mesh))
    return {name: parameter.detach() for name, parameter in model.named_parameters()}
