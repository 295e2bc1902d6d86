"""A model cut into pipeline stages: one FSDP module per stage of this rank, and the schedule that runs them.

Note "Reductions under a pipeline": each stage has an FSDP of its own over the ranks that hold the same stage. Of its
microbatches, all but the last run their backward (and their delayed weight gradients) under `no_sync`, whatever the
other stages of the rank do in between: ZeRO-2 and -3 reduce every microbatch into shards, no_shard and ZeRO-1 once.

Note "Tied embedding and head": the first and the last stage each hold the weight as a unit of its own, so that both
cut it in the same way. Each reduces its gradient over its own FSDP group; then the shards are summed over the two
stages, before norm and clipping. The last stage's copy is annotated `duplicate`: norms and counts leave it out. Both
see the same gradient and the same optimizer, so they stay equal bit for bit. The stage of multi-token prediction, which
embeds tokens as well, is one more of them.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.fsdp import FullyShardedDataParallel
from megatron.models.backends.base import Backend
from megatron.models.config import ModelConfig
from megatron.parallel.flight import Recorded
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.pipeline.actions import PipelineShape
from megatron.parallel.pipeline.stages import StageLayers, StageRequest, place_layers, prediction_stage
from megatron.train.pipeline_runner import Batch, LossFunction, MicrobatchLoss, PipelineRunner


@dataclass(frozen=True)
class PipelinePlan:
    """How the pipeline runs, the same on all ranks.

    Attributes:
        stages: what each stage holds.
        schedule: one of megatron.parallel.pipeline.schedules.SCHEDULES.
        group_size: microbatches that go through a chunk in a row; None: as many as ranks.
        overlap: compute while messages travel.
        timeout: for a message.
    """

    stages: tuple[StageLayers, ...]
    schedule: str = "1f1b"
    group_size: int | None = None
    overlap: bool = True
    timeout: timedelta | None = None

    def describe(self) -> str:
        """One line for the log."""
        layers = " ".join(str(len(stage.layers)) for stage in self.stages)
        return f"pipeline of {len(self.stages)} stages with {layers} layers, schedule {self.schedule}"

    def shape(self, num_ranks: int, num_microbatches: int) -> PipelineShape:
        """The pipeline's sizes for a step of this many microbatches."""
        return PipelineShape(num_ranks, num_microbatches, len(self.stages) // num_ranks)


def pipeline_plan(config: Any) -> PipelinePlan:
    """The plan that the validated configuration describes.

    Raises ValueError, naming the flags, for layers that do not fit the stages.
    """
    chunks = config.virtual_pipeline_model_parallel_size or 1
    request = StageRequest(
        config.num_layers,
        config.account_for_embedding_in_pipeline_split,
        config.account_for_loss_in_pipeline_split,
        config.decoder_first_pipeline_num_layers,
        config.decoder_last_pipeline_num_layers,
        config.pipeline_model_parallel_layout,
    )
    schedule = "zero-bubble" if config.delay_wgrad_compute else "interleaved" if chunks > 1 else "1f1b"
    if config.pipeline_schedule is not None:
        schedule = config.pipeline_schedule
        if (schedule == "zero-bubble") != config.delay_wgrad_compute:
            raise ValueError(
                f"--pipeline-schedule {schedule} {'needs' if schedule == 'zero-bubble' else 'does not go with'} "
                "--delay-wgrad-compute"
            )
    return PipelinePlan(
        place_layers(request, config.pipeline_model_parallel_size, chunks),
        schedule,
        config.microbatch_group_size_per_vp_stage,
        overlap=config.overlap_p2p_comm,
        timeout=timedelta(minutes=config.distributed_timeout_minutes + 1),  # the watchdog speaks first
    )


def embedding_stages(config: ModelConfig, plan: PipelinePlan) -> list[int]:
    """The stages with a copy of the word embedding (note "Tied embedding and head"), in order."""
    stages = {0}
    if not config.untie_embeddings_and_output_weights:
        stages.add(len(plan.stages) - 1)
    if config.mtp is not None:
        stages.add(prediction_stage(plan.stages))
    return sorted(stages)


class PipelineModel(nn.Module):
    """The stages of this rank behind the interface of one data-parallel model. Names are the whole model's.

    Args:
        chunks: this rank's stages by number, each wrapped.
        config: of the whole model.
        backend: that built the layers.
        mesh: of the run.
        plan: of the pipeline.

    Collective: makes the group of the stages that hold the word embedding, where there are several.
    """

    def __init__(
        self,
        chunks: Mapping[int, FullyShardedDataParallel],
        config: ModelConfig,
        backend: Backend,
        mesh: ParallelMesh,
        plan: PipelinePlan,
    ) -> None:
        super().__init__()
        self.chunks = nn.ModuleDict({str(stage): chunk for stage, chunk in chunks.items()})
        self.by_stage = dict(chunks)
        self.config, self.plan, self.mesh = config, plan, mesh
        self.runner = PipelineRunner(self, backend)
        self._tied_group: ProcessGroup | None = None
        self._embedding_stages = embedding_stages(config, plan)
        if len(self._embedding_stages) > 1:
            ranks = [stage % mesh.size("pp") for stage in self._embedding_stages]
            assert len(set(ranks)) == len(ranks), "a rank holds two copies of the embedding"
            self._tied_group = mesh.subgroup("pp", ranks)
        self._sum_tied = False
        self.auxiliary_scale: Callable[[Batch], float | Tensor] | None = None
        """Of a microbatch, where the scale of its auxiliary gradients is its own (megatron/train/auxiliary.py)."""

    # --- running -------------------------------------------------------------------------------------------------

    def train_microbatches(
        self, batches: Iterator[Batch], count: int, loss: MicrobatchLoss
    ) -> tuple[Tensor, Tensor]:
        """Forward and backward of the next `count` batches; collective over the pipeline.

        Returns losses and numbers of valid tokens as `loss` reports them, fp64 [count] each; zeros on ranks without the
        last stage.
        """
        return self.runner.train(batches, count, loss)

    def evaluate_microbatches(self, batches: Iterable[Batch], loss_function: LossFunction) -> Tensor:
        """[sum of losses, valid tokens] of all batches, fp64; zeros on ranks without the last stage."""
        return self.runner.evaluate(batches, loss_function)

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        """A stage alone has nothing to say."""
        raise RuntimeError(
            "a pipeline has no forward of its own: call train_microbatches or evaluate_microbatches"
        )

    # --- what a training loop calls ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backward belongs to a microbatch that is not the step's last, in all stages."""
        with contextlib.ExitStack() as stack:
            for chunk in self.by_stage.values():
                stack.enter_context(chunk.no_sync())
            yield

    def finish_grad_sync(self) -> None:
        """Return when `.grad` of every parameter is the reduced gradient (note "Tied embedding and head")."""
        for chunk in self.by_stage.values():
            chunk.finish_grad_sync()
        if self._tied_group is not None and self._sum_tied:
            gradient = self._tied_weight().grad
            assert gradient is not None, "the tied embedding has no gradient"
            local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            with torch.profiler.record_function("train.sum_tied_embedding"), torch.no_grad():
                if local.numel():
                    with Recorded("all_reduce", self._tied_group, (local,), "a tied weight's gradient"):
                        dist.all_reduce(local, group=self._tied_group)
        self._sum_tied = False

    def _tied_weight(self) -> Tensor:
        stage = next(stage for stage in self._embedding_stages if stage in self.by_stage)
        return dict(self.by_stage[stage].named_parameters())["embedding.word_embeddings.weight"]

    def start_param_sync(self, *_unused: object, **_options: object) -> None:
        """Start the gathers that are due after an optimizer step."""
        for chunk in self.by_stage.values():
            chunk.start_param_sync()

    def zero_grad_buffer(self) -> None:
        """Forget all gradients."""
        self._sum_tied = True
        for chunk in self.by_stage.values():
            chunk.zero_grad_buffer()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, as `zero_grad_buffer`."""
        self.zero_grad_buffer()

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply every reduced gradient by `factor`."""
        for chunk in self.by_stage.values():
            chunk.scale_gradients(factor)

    def broadcast_params(self) -> None:
        """Make replicas of main parameters equal to those of their first rank."""
        for chunk in self.by_stage.values():
            chunk.broadcast_params()

    # --- names and state are the whole model's --------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """What `FullyShardedDataParallel.module` is for callers that read state by name: this model."""
        return self

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """(name in the whole model, sharded parameter) of this rank's stages."""
        return itertools.chain.from_iterable(
            chunk.named_parameters(prefix, recurse, remove_duplicate) for chunk in self.by_stage.values()
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """This rank's stages' state by names of the whole model."""
        states = [chunk.state_dict(*args, **kwargs) for chunk in self.by_stage.values()]
        return {name: value for state in states for name, value in state.items()}

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load what this rank's stages hold of a state of the whole model; the rest is not looked at."""
        for chunk in self.by_stage.values():
            own = chunk.state_dict()
            mine = {name: value for name, value in state_dict.items() if name in own}
            result = chunk.load_state_dict(mine, strict, assign)
        return result
