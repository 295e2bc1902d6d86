"""Training runs over tensor, context and data-parallel ranks, for test_layouts.py. Imported by the workers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.models.backends.base import LayerOptions
from megatron.models.backends.torch import TorchBackend
from megatron.models.config import ModelConfig, RecomputeConfig
from megatron.models.gpt import GPTModel
from megatron.models.variants import Variants
from megatron.parallel.context.balance import split_batch
from megatron.parallel.context.documents import Documents
from megatron.parallel.mesh import ParallelMesh, ParallelSizes
from megatron.train.build import wrap_model
from megatron.train.lr_schedule import OptimizerParamScheduler, ScheduleConfig
from megatron.train.optimizer import build_optimizer
from megatron.train.step import BatchSize, StepOptions, TrainState, TrainStep
from tests.unit.train import equivalence
from tests.unit.train.equivalence import CLIP, MICRO_BATCH, VOCABULARY, Case
from tests.unit.train.pipeline_runs import Piece, pieces

STEPS = equivalence.STEPS
LENGTH = 16
"""Divides by 2 * cp for cp 8."""


@dataclass(frozen=True)
class LayoutCase(Case):
    """Ranks of each axis and what concerns them; the rest as in Case.

    Eight heads in two groups: fewer groups than tensor-parallel ranks at tp 4, than all-to-all ranks at cp 4.
    `labels`: "some" are valid at random, or those of the "first" quarter of each sample only, which context rank 0
    holds.
    """

    optimizer: str = "sgd"
    tp: int = 1
    cp: int = 1
    dp: int = 1
    sequence_parallel: bool = False
    kind: str = "p2p"
    documents: bool = False
    recompute: bool = False
    labels: str = "some"
    sinks: bool = False

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.dp

    @property
    def model(self) -> ModelConfig:
        return super().model.replace(
            num_attention_heads=8,
            num_query_groups=2,
            kv_channels=4,
            max_position_embeddings=LENGTH,
            variants=Variants(softmax_type="learnable" if self.sinks else "vanilla"),
            cp_comm_type=(self.kind,),
            hierarchical_context_parallel_sizes=(2, self.cp // 2) if self.kind == "a2a+p2p" else None,
        )

    @property
    def plain(self) -> LayoutCase:
        """What the one-rank run depends on."""
        return LayoutCase(
            microbatches=self.microbatches, optimizer=self.optimizer, per_token=self.per_token, tied=self.tied,
            documents=self.documents, labels=self.labels, sinks=self.sinks,
        )  # fmt: skip

    def batch(self, step: int, index: int) -> dict[str, Tensor]:
        """As in Case; with `documents`, three or so of them are packed in each sample."""
        generator = torch.Generator().manual_seed(1000 * step + index)
        tokens = torch.randint(0, VOCABULARY, (MICRO_BATCH, LENGTH + 1), generator=generator)
        mask = (torch.rand(MICRO_BATCH, LENGTH, generator=generator) < 0.3 + 0.2 * (index % 4)).float()
        mask[0, 0] = 1.0
        if self.labels == "first":
            mask[:, LENGTH // 4 :] = 0.0
        one = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask}
        if self.documents:
            begins = torch.rand(MICRO_BATCH, LENGTH, generator=generator) < 0.2
            one["document_ids"] = begins.long().cumsum(1).to(torch.int32)
            one["position_ids"] = Documents.from_ids(one["document_ids"]).position_ids()
        else:
            one["position_ids"] = torch.arange(LENGTH).expand(MICRO_BATCH, LENGTH)
        return one


@dataclass
class LayoutTrace:
    """What one rank saw: numbers of the model, pieces of its own parameters."""

    losses: list[float] = dataclasses.field(default_factory=list)
    norms: list[float] = dataclasses.field(default_factory=list)
    tokens: list[int] = dataclasses.field(default_factory=list)
    gradients: list[dict[str, list[Piece]]] = dataclasses.field(default_factory=list)
    weights: dict[str, list[Piece]] = dataclasses.field(default_factory=dict)
    initial: dict[str, list[Piece]] = dataclasses.field(default_factory=dict)


def train(rank: int, world: int, case: LayoutCase) -> LayoutTrace:
    """STEPS steps of `case` on its ranks."""
    mesh = ParallelMesh(ParallelSizes(tensor=case.tp, context=case.cp, data=case.dp, data_outer=case.outer))
    options = LayerOptions.from_mesh(
        mesh,
        sequence_parallel=case.sequence_parallel and case.tp > 1,
        params_dtype=case.dtype,
        device="meta",
        fuse_wgrad_accumulation=case.fused,
    )
    config = case.model
    if case.recompute:
        config = config.replace(recompute=RecomputeConfig("full", "uniform", 1))
    model = GPTModel(config, TorchBackend(options), mesh)
    wrapped = wrap_model(model, equivalence.train_config(case, case.dp), mesh, torch.device("cpu"))
    optimizer = build_optimizer(wrapped.named_parameters(), equivalence.optimizer_options(case))
    schedule = ScheduleConfig(
        max_lr=case.lr, decay_style="constant", start_weight_decay=0.1, end_weight_decay=0.1
    )
    state = TrainState(wrapped, optimizer, OptimizerParamScheduler(optimizer, schedule))
    step = TrainStep(state, mesh, StepOptions(per_token=case.per_token, clip_grad=CLIP))
    named = list(wrapped.named_parameters())
    trace = LayoutTrace()
    trace.initial = {name: pieces(name, one, one, mesh) for name, one in named}

    def record(*_: object) -> None:
        if len(trace.losses) in equivalence.RECORDED:
            trace.gradients.append({name: pieces(name, one.grad, one, mesh) for name, one in named})

    optimizer.register_step_pre_hook(record)
    size = BatchSize(case.microbatches, case.dp * case.microbatches * MICRO_BATCH)
    for index in range(STEPS):
        whole = (case.batch(index, m * case.dp + mesh.rank("dp")) for m in range(case.microbatches))
        result = step((dict(split_batch(one, case.cp, mesh.rank("cp"))) for one in whole), size)
        trace.losses.append(result.loss)
        trace.norms.append(result.grad_norm)
        trace.tokens.append(result.num_tokens)
    trace.weights = {name: pieces(name, one, one, mesh) for name, one in named}
    return trace
