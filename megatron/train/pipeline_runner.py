"""Runs the schedules of a PipelineModel (megatron/train/pipeline.py): microbatches in, losses out.

Note "Every rank reads the data": stages in the middle need positions and masks, and shapes; so each rank takes the same
microbatches from its iterator, and no shape has to travel.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron.fsdp.main_grad import waiting_wgrads
from megatron.models.backends.base import Backend
from megatron.parallel.pipeline.actions import Compute, Kind, Program
from megatron.parallel.pipeline.executor import ExecutorOptions, PipelineExecutor, StageFunctions
from megatron.parallel.pipeline.lower import lower
from megatron.parallel.pipeline.p2p import Channel, Message, TensorSpec
from megatron.parallel.pipeline.schedules import forward_only, make_schedule
from megatron.parallel.pipeline.stages import prediction_stage

if TYPE_CHECKING:
    from megatron.train.pipeline import PipelineModel

Batch = Mapping[str, Tensor]
MicrobatchLoss = Callable[[Tensor, Batch], tuple[Tensor, Tensor, Tensor]]
"""(per-token losses, batch) -> (what to call backward on, loss to report, valid tokens)."""
LossFunction = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class PendingWeightGradients:
    """Delayed weight gradients of one stage: computes, on demand, those that one microbatch's backward left.

    A layer that was called twice left two. Layers keep them first in, first out, and so do schedules.

    Args:
        modules: that delay theirs (Transformer Engine's `wgrad_store` and `backward_dw`), in the order of computing.
    """

    def __init__(self, modules: Sequence[Any]) -> None:
        self._modules = list(modules)
        self._left: dict[int, list[int]] = {}

    @contextlib.contextmanager
    def counting(self, microbatch: int) -> Iterator[None]:
        """Around the backward of `microbatch`."""
        before = [waiting_wgrads(module) for module in self._modules]
        yield
        self._left[microbatch] = [
            waiting_wgrads(module) - count for module, count in zip(self._modules, before, strict=True)
        ]

    def compute(self, microbatch: int) -> None:
        """Compute what `microbatch` left."""
        for module, count in zip(self._modules, self._left.pop(microbatch), strict=True):
            target = waiting_wgrads(module) - count
            while waiting_wgrads(module) > target:
                module.backward_dw()


class Microbatches:
    """The batches of one step: each is taken from the iterator once, however many stages of the rank need it."""

    def __init__(self, source: Iterator[Batch], num_uses: int) -> None:
        self._source = source
        self._num_uses = num_uses
        self._batches: list[Batch] = []
        self._uses: dict[int, int] = {}

    def peek(self, index: int) -> Batch:
        """Microbatch `index`, which stays."""
        while len(self._batches) <= index:
            self._batches.append(next(self._source))
        return self._batches[index]

    def take(self, index: int) -> Batch:
        """Microbatch `index`; forgotten when all stages have taken it."""
        batch = self.peek(index)
        self._uses[index] = self._uses.get(index, 0) + 1
        if self._uses[index] == self._num_uses:
            self._batches[index] = {}
        return batch


class PipelineRunner:
    """Runs a PipelineModel's schedules."""

    def __init__(self, model: PipelineModel, backend: Backend) -> None:
        self.model = model
        self.mesh, self.plan = model.mesh, model.plan
        group = self.mesh.group("pp")
        assert group is not None, "a pipeline has at least two ranks"
        self.device = torch.device(self.mesh.device_type)
        self.channel = Channel(group, self.device, timeout=self.plan.timeout)
        self.options = backend.options
        self.pending = {
            stage: PendingWeightGradients(
                [module for module in reversed(list(chunk.modules())) if backend.needs_backward_dw(module)]
            )
            for stage, chunk in model.by_stage.items()
        }
        self.scales: dict[int, float | Tensor] = {}
        self._programs: dict[tuple[int, bool], Program] = {}
        self.last_executor: PipelineExecutor | None = None
        """Of the last run; what it recorded and its peak are there to be looked at."""

    def train(self, batches: Iterator[Batch], count: int, loss: MicrobatchLoss) -> tuple[Tensor, Tensor]:
        source = Microbatches(batches, len(self.model.by_stage))
        reported = torch.zeros(2, count, dtype=torch.float64, device=self.device)

        def on_last(microbatch: int, losses: Tensor, batch: Batch) -> Tensor:
            root, reported[0, microbatch], reported[1, microbatch] = loss(losses, batch)
            return root

        self._run(source, count, on_last, True)
        return reported[0], reported[1]

    def evaluate(self, batches: Iterable[Batch], loss_function: LossFunction) -> Tensor:
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)

        def on_last(_microbatch: int, losses: Tensor, batch: Batch) -> Tensor:
            total, valid = loss_function(losses, batch["loss_mask"])
            sums.add_(torch.stack([total.double(), valid.double()]))
            return total

        iterator = iter(batches)
        while window := list(itertools.islice(iterator, 4 * self.mesh.size("pp"))):
            source = Microbatches(iter(window), len(self.model.by_stage))
            self._run(source, len(window), on_last, False)
        return sums

    def _run(
        self,
        source: Microbatches,
        count: int,
        on_last: Callable[[int, Tensor, Batch], Tensor],
        training: bool,
    ) -> None:
        shape, rank = self.plan.shape(self.mesh.size("pp"), count), self.mesh.rank("pp")
        if (count, training) not in self._programs:
            plan = self.plan
            orders = make_schedule(plan.schedule, shape, plan.group_size) if training else forward_only(shape)
            self._programs[count, training] = lower(orders, shape)[rank]
        functions = {
            stage: StageFunctions(
                self._forward_of(stage, source, on_last),
                self.pending[stage].compute,
                self._flags_of(stage, count),
            )
            for stage in self.model.by_stage
        }

        def specs(stage: int, microbatch: int) -> tuple[TensorSpec, ...]:
            return self._specs(stage, source.peek(microbatch), training)

        options = ExecutorOptions(specs, overlap=self.plan.overlap, with_gradients=training)
        self.last_executor = PipelineExecutor(
            self._programs[count, training], shape, rank, functions, self.channel, options
        )
        self.last_executor.run()

    def _forward_of(
        self, stage: int, source: Microbatches, on_last: Callable[[int, Tensor, Batch], Tensor]
    ) -> Callable[[int, Message], Tensor | Message]:
        chunk, last = self.model.by_stage[stage], stage == len(self.plan.stages) - 1

        def forward(microbatch: int, inputs: Message) -> Tensor | Message:
            batch = source.take(microbatch)
            if self.model.auxiliary_scale is not None:
                self.scales[microbatch] = self.model.auxiliary_scale(batch)
            arguments: dict[str, Any] = {name: value for name, value in batch.items() if name != "loss_mask"}
            if arguments.get("position_ids") is None and self.mesh.size("cp") == 1:
                tokens = arguments["tokens"]
                arguments["position_ids"] = torch.arange(tokens.shape[1], device=tokens.device).expand_as(
                    tokens
                )
            if inputs:
                arguments["hidden"] = inputs[0]
            if len(inputs) > 1:
                arguments["predicted"] = inputs[1:]
            if last and self.model.config.mtp is not None:
                arguments["loss_mask"] = batch["loss_mask"]
            if not last:
                arguments.pop("labels", None)
                made: Tensor | Message = chunk(**arguments)
                return made
            return on_last(microbatch, chunk(**arguments), batch)

        return forward

    def _flags_of(self, stage: int, count: int) -> Callable[[Compute], AbstractContextManager[None]]:
        chunk, pending = self.model.by_stage[stage], self.pending[stage]
        auxiliary: Any = getattr(chunk.module, "auxiliary", None)

        @contextlib.contextmanager
        def flags(action: Compute) -> Iterator[None]:
            if action.microbatch in self.scales:
                auxiliary.scale = self.scales[action.microbatch]
            with contextlib.ExitStack() as stack:
                if action.microbatch < count - 1:
                    stack.enter_context(chunk.no_sync())
                if action.kind is Kind.INPUT:
                    stack.enter_context(pending.counting(action.microbatch))
                yield

        return flags

    def _specs(self, stage: int, batch: Batch, training: bool) -> tuple[TensorSpec, ...]:
        """Of what `stage` gets: hidden states, in training with those of the depths of multi-token prediction."""
        config = self.model.config
        num_sequences, length = batch["tokens"].shape
        if self.options.sequence_parallel:
            length //= self.options.tp_size
        predicted = config.mtp is not None and stage == prediction_stage(self.plan.stages) + 1
        # The final norm, which comes before the prediction, gives what the layers compute in.
        wide = config.fp32_residual_connection and not predicted
        dtype = torch.float32 if wide else self.options.params_dtype
        depths = config.mtp.num_layers if config.mtp is not None and predicted and training else 0
        return (TensorSpec((length, num_sequences, config.hidden_size), dtype),) * (1 + depths)
