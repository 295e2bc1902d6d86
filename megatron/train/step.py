"""One training step: microbatches forward and backward, one reduction of numbers, one decision, one update.

Note "One scale". The loss function returns (sum, valid tokens). Mean mode: a microbatch's loss is sum /
tokens over cp, and the step's is the mean over data-parallel ranks and microbatches: here 1 /
num_microbatches, in FSDP 1 / dp. Per-token mode (--calculate-per-token-loss): sum / tokens of the whole
global batch; FSDP only sums, and the division comes here, once, after all gradients are reduced.

Note "One collective, one wait". Norm, loss, token count, and what must be decided alike on all ranks (an
overflow, a signal to stop) are summed over the world in one fp64 vector and read by the host once. What
follows (per-token division, loss scale, clipping) is one factor on the gradients.

Note "Numbers that are no numbers". A NaN on one rank makes the sums NaN on all, so all ranks decide alike:
stop, or skip the update and count it. Parameters, optimizer state and schedule are untouched by a skipped
step. Before that a step with such numbers is run again (rerun.py), to tell what comes back from what passes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.parallel.annotate import annotation_of
from megatron.parallel.flight import Recorded
from megatron.parallel.interleave import Interleaver
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.replicated import sum_replicated_gradients
from megatron.train.auxiliary import StepAuxiliary
from megatron.train.errors import RunStopped
from megatron.train.grad_norm import GradientStatistics, clip_coefficient, local_tensor
from megatron.train.loss_scale import LossScaleConfig, LossScaler
from megatron.train.lr_schedule import OptimizerParamScheduler
from megatron.train.overlap import DelayedWeightGradients, use_waits
from megatron.train.pipeline import PipelineModel
from megatron.train.rerun import (
    Attempt,
    Guard,
    Numbers,
    RandomState,
    RerunOptions,
    Window,
    where_not_finite,
)
from megatron.train.timers import BACKWARD, BATCH, FORWARD, FORWARD_BACKWARD, GRADIENTS, OPTIMIZER, Timers

Batch = dict[str, Tensor]
LossFunction = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class DataParallelModel(Protocol):
    """What a step needs of the wrapped model (megatron.fsdp.FullyShardedDataParallel)."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def named_parameters(self) -> Iterator[tuple[str, Tensor]]: ...
    def no_sync(self) -> contextlib.AbstractContextManager[None]: ...
    def finish_grad_sync(self) -> None: ...
    def zero_grad_buffer(self) -> None: ...
    def scale_gradients(self, factor: float) -> None: ...


@dataclass(frozen=True)
class TrainState:
    """Everything that training changes, and so what a checkpoint holds (beside the position in the data)."""

    model: DataParallelModel
    optimizer: torch.optim.Optimizer
    schedule: OptimizerParamScheduler
    scaler: LossScaler = field(default_factory=lambda: LossScaler(LossScaleConfig()))


@dataclass(frozen=True)
class StepOptions:
    """What a step does.

    Attributes:
        per_token: note "One scale".
        clip_grad: largest global norm; 0 does not clip.
        stop_at_nan: stop at a loss or gradient that is no finite number, else skip the update.
        count_zeros: count the zeros of all gradients.
        overlap_experts: a microbatch's forward takes turns with the backward of the one before (train/overlap.py).
        rerun: which results are looked at twice.
    """

    per_token: bool = False
    clip_grad: float = 1.0
    stop_at_nan: bool = True
    count_zeros: bool = False
    overlap_experts: bool = False
    rerun: RerunOptions = field(default_factory=RerunOptions)


@dataclass(frozen=True)
class StepTools:
    """What a step is watched with. streams: of dropout, whose state a second run needs."""

    timers: Timers = field(default_factory=Timers)
    streams: Any = None


@dataclass(frozen=True)
class BatchSize:
    """Of one step: microbatches of this rank, and samples of the global batch (what moves the schedule)."""

    num_microbatches: int
    samples: int


@dataclass(frozen=True)
class StepResult:
    """Numbers of one step, the same on every rank.

    `loss`: per token, by the rule of the mode. `auxiliary`: losses and loads of the layers' own, by name.
    `notes`: lines for the log.
    """

    loss: float
    grad_norm: float
    num_zeros: int | None
    num_tokens: int
    skipped: bool
    loss_scale: float
    stop_requested: bool
    auxiliary: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def masked_loss(losses: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    """(sum of the losses of valid tokens, their number), both fp32 scalars.

    losses, loss_mask: [batch, sequence].
    """
    mask = loss_mask.to(losses.dtype).reshape(-1)
    return torch.sum(losses.reshape(-1) * mask), mask.sum()


def model_inputs(batch: Batch) -> dict[str, Tensor]:
    """A batch's tensors under the names of the model's forward."""
    return {name: value for name, value in batch.items() if name != "loss_mask"}


class TrainStep:
    """Runs training steps. Everything it works on is given; it keeps no position of its own."""

    def __init__(
        self,
        state: TrainState,
        mesh: ParallelMesh,
        options: StepOptions,
        *,
        loss_function: LossFunction = masked_loss,
        device: torch.device | str = "cpu",
        tools: StepTools | None = None,
    ) -> None:
        tools = tools or StepTools()
        self.timers, self.streams = tools.timers, tools.streams
        self.guard = Guard(options.rerun, mesh.global_rank)
        self.model, self.optimizer = state.model, state.optimizer
        self.schedule, self.scaler = state.schedule, state.scaler
        self.mesh = mesh
        self.options = options
        self.loss_function = loss_function
        self.device = torch.device(device)
        self.named_parameters = [pair for pair in self.model.named_parameters() if pair[1].requires_grad]
        self.auxiliary = StepAuxiliary(state.model)
        if isinstance(self.model, PipelineModel) and options.per_token and self.auxiliary.present:
            self.model.auxiliary_scale = self._auxiliary_scale
        self._interleaver = Interleaver() if options.overlap_experts else None
        # A pipeline's schedule computes its own.
        self._delayed = DelayedWeightGradients(None if isinstance(self.model, PipelineModel) else self.model)
        use_waits(self.model, self._delayed, self._interleaver)
        self.statistics = GradientStatistics(
            [parameter for _, parameter in self.named_parameters], mesh, with_zeros=options.count_zeros
        )

    def __call__(
        self, batches: Iterator[Batch], size: BatchSize, *, stop_requested: bool = False
    ) -> StepResult:
        """One step over the next `size.num_microbatches` batches.

        Args:
            batches: of this rank, on this device; keys tokens, labels, loss_mask and what else forward takes.
            size: of the step.
            stop_requested: this rank wants to end the run; the result says whether any rank does.

        Raises:
            RunStopped: a loss or gradient is no finite number and the options say to stop.
        """
        window, injected = Window(batches), self.guard.injects()
        again = self.guard.reruns
        random_state = RandomState(self.device, self.streams) if again else None
        attempt = self._attempt(iter(window), size, stop_requested, injected)
        notes: list[str] = []
        if random_state is not None and not self._expected(attempt):

            def run_again() -> Attempt:
                random_state.restore()
                self.auxiliary.forget()
                persistent = injected and self.options.rerun.persistent
                return self._attempt(iter(window), size, attempt.numbers.stop > 0, persistent)

            attempt, notes = self.guard.judge(attempt, run_again, self.named_parameters, self.mesh)
        numbers, scale = attempt.numbers, self.scaler.scale
        skipped = attempt.overflow or not math.isfinite(numbers.loss)
        if skipped and self.options.stop_at_nan and not self._expected(attempt):
            raise RunStopped(self._explain(attempt, notes))
        self.scaler.update(attempt.overflow)
        if not skipped:
            self.guard.accept(numbers.loss, attempt.norm)
            self._update(
                attempt.inverse * clip_coefficient(attempt.norm, self.options.clip_grad), size.samples
            )
        everywhere = size.num_microbatches * self.mesh.size("dp")
        auxiliary = self.auxiliary.finish(numbers.auxiliary, everywhere, updated=not skipped)
        return StepResult(
            loss=numbers.loss,
            grad_norm=attempt.norm,
            num_zeros=int(numbers.zeros) if self.options.count_zeros else None,
            num_tokens=int(numbers.tokens),
            skipped=skipped,
            loss_scale=scale,
            stop_requested=numbers.stop > 0,
            auxiliary=auxiliary,
            notes=tuple(notes),
        )

    def _attempt(
        self, batches: Iterator[Batch], size: BatchSize, stop_requested: bool, injected: bool
    ) -> Attempt:
        """Everything up to the decision: gradients, reduced, and the step's numbers."""
        with self.timers(FORWARD_BACKWARD):
            losses, tokens = self._forward_backward(batches, size.num_microbatches)
        if injected:
            losses = losses * math.nan
        with self.timers(GRADIENTS), torch.profiler.record_function("train.finish_grad_sync"):
            self.model.finish_grad_sync()
            sum_replicated_gradients(
                (
                    (annotation_of(parameter), local_tensor(parameter.grad))
                    for _, parameter in self.named_parameters
                    if parameter.grad is not None
                ),
                self.mesh,
            )
        numbers = self._reduce(losses, tokens, stop_requested)
        inverse = self._gradient_factor(numbers.tokens)
        norm = math.sqrt(numbers.squares) * inverse if numbers.squares >= 0 else math.nan
        return Attempt(losses, numbers, inverse, norm, overflow=not math.isfinite(norm))

    def _expected(self, attempt: Attempt) -> bool:
        """An overflow that a dynamic loss scale is there for."""
        return attempt.overflow and self.scaler.config.dynamic

    def _forward_backward(self, batches: Iterator[Batch], count: int) -> tuple[Tensor, Tensor]:
        """All microbatches; returns their losses (unscaled) and numbers of valid tokens, [num_microbatches]
        each.
        """
        self.model.zero_grad_buffer()
        self.auxiliary.set_scale(self.scaler.scale / count)
        if isinstance(self.model, PipelineModel):
            return self.model.train_microbatches(
                batches, count, lambda losses, batch: self._loss(losses, batch, count)
            )
        made: list[_Forward] = []
        for index in range(count):
            with self.timers(BATCH):
                batch = next(batches)
            if self._interleaver is None or not made:
                made.append(self._forward(batch, count))
            else:
                made.append(self._take_turns(batch, count, made[-1], self._interleaver))
            if self._interleaver is None or index == count - 1:
                with self.model.no_sync() if index < count - 1 else contextlib.nullcontext():
                    self._backward(made[-1])
        return torch.stack([each.loss for each in made]), torch.stack([each.tokens for each in made])

    def _forward(self, batch: Batch, count: int) -> _Forward:
        with self.timers(FORWARD), torch.profiler.record_function("train.forward"):
            inputs = model_inputs(batch)
            if self.auxiliary.wants_mask:
                inputs["loss_mask"] = batch["loss_mask"]
            return _Forward(batch, *self._loss(self.model(**inputs), batch, count))

    def _backward(self, made: _Forward) -> None:
        if self.options.per_token and self.auxiliary.present:
            self.auxiliary.set_scale(self._auxiliary_scale(made.batch))
        self._run_backward(made)

    def _run_backward(self, made: _Forward) -> None:
        assert made.root is not None, "a microbatch has one backward"
        root, made.root, made.batch = made.root, None, {}
        with self.timers(BACKWARD), torch.profiler.record_function("train.backward"):
            root.backward()
            self._delayed.compute()

    def _take_turns(self, batch: Batch, count: int, before: _Forward, interleaver: Interleaver) -> _Forward:
        """The forward of `batch` and the backward of the microbatch before, which is not the step's last."""
        if self.options.per_token and self.auxiliary.present:
            self.auxiliary.set_scale(self._auxiliary_scale(before.batch))
        with self.model.no_sync():
            return interleaver.run(lambda: self._forward(batch, count), lambda: self._run_backward(before))

    def _loss(self, losses: Tensor, batch: Mapping[str, Tensor], count: int) -> tuple[Tensor, Tensor, Tensor]:
        """(what to call backward on, the microbatch's loss, its valid tokens); the latter two detached, in fp64."""
        total, valid = self.loss_function(losses, batch["loss_mask"])
        if self.options.per_token:
            loss, weight = total, 1.0
        else:
            over_context = self._over_context(valid)
            # A microbatch (or all of cp's share of it) without a valid token has loss 0, not 0/0.
            loss, weight = total / over_context.clamp(min=1.0), 1.0 / count
        root = loss * (weight * self.scaler.scale)
        return root, loss.detach().double(), valid.detach().double()

    def _auxiliary_scale(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Per-token mode: a mean counts once for each token of its microbatch, all being divided in the end."""
        return self._over_context(batch["loss_mask"].sum()) * self.scaler.scale

    def _over_context(self, valid: Tensor) -> Tensor:
        """Valid tokens of the microbatch on all its context-parallel ranks."""
        total = valid.detach().clone()
        group = self.mesh.group("cp")
        if group is not None:
            with Recorded("all_reduce", group, (total,), "valid tokens"):
                dist.all_reduce(total, group=group)
        return total

    def _reduce(self, losses: Tensor, tokens: Tensor, stop_requested: bool) -> Numbers:
        """Sum the step's numbers over the world (note "One collective, one wait")."""
        # The loss of a data-parallel rank is known to all its tensor-parallel ranks; the first counts.
        counts = float(self.mesh.rank("tp") == 0 and self.mesh.rank("pp") == self.mesh.size("pp") - 1)
        own = torch.stack([losses.sum() * counts, tokens.sum() * counts])
        flag = torch.tensor([float(stop_requested)], dtype=torch.float64, device=self.device)
        vector = torch.cat(
            [self.statistics.local(self.device), own, flag, self.auxiliary.vector(self.device)]
        )
        group = self.mesh.group("world")
        if group is not None:
            with Recorded("all_reduce", group, (vector,), "the step's numbers"):
                dist.all_reduce(vector, group=group)
        vector = vector.cpu()
        squares, zeros, loss, valid, stop = vector[:5].tolist()
        if self.options.per_token:
            loss /= max(valid, 1.0)
        else:
            loss /= len(losses) * self.mesh.size("dp")
        return Numbers(squares, zeros, loss, valid, stop, vector[5:])

    def _gradient_factor(self, tokens: float) -> float:
        per_token = 1.0 / max(tokens, 1.0) if self.options.per_token else 1.0
        return per_token / self.scaler.scale

    def _update(self, factor: float, samples: int) -> None:
        with self.timers(OPTIMIZER), torch.profiler.record_function("train.optimizer"):
            if factor != 1.0:
                self.model.scale_gradients(factor)
            self.optimizer.step()
        self.schedule.step(samples)

    def _explain(self, attempt: Attempt, notes: list[str]) -> str:
        """Why the run stops; the same text on all ranks."""
        found = notes[-1:] or [
            f"the loss is {attempt.numbers.loss} and the gradient norm {attempt.norm}; "
            f"{where_not_finite(attempt.losses, self.named_parameters, self.mesh)}"
        ]
        return (
            f"{found[0]}. Parameters are untouched. Lower --lr or lengthen the warm-up, or pass "
            "--no-check-for-nan-in-loss-and-grad to skip such updates"
        )


@dataclass
class _Forward:
    """What a microbatch's forward left: the tensor to call backward on, its loss and valid tokens."""

    batch: Batch
    root: Tensor | None
    loss: Tensor
    tokens: Tensor
