"""Runs one rank's program: any callables as stages, messages over a channel, autograd in between.

Note "Autograd at stage borders": what arrives is made a leaf that wants a gradient (if it is floating point); what
leaves is detached. A stage's backward starts from the gradients that the next stage found for its inputs, zeros for
those that it did not use. A stage of which nothing asks for a gradient has no backward but still takes part.

Note "Two halves": an INPUT action runs autograd's whole backward; layers that delay their weight gradients keep the
operands, and the WEIGHT action computes them by `backward_weights`. What else autograd finds (norms, biases) it finds
with the input gradients. Without layers that delay there is nothing left for WEIGHT, and the values are the same.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.profiler import record_function

from megatron.parallel.pipeline.actions import (
    Compute,
    Exchange,
    Kind,
    PipelineShape,
    Program,
    Transfer,
    transfer_of,
)
from megatron.parallel.pipeline.p2p import Channel, Message, Posted, Receive, Send, TensorSpec

_WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "input gradients",
    Kind.WEIGHT: "weight gradients",
}


class PipelineError(RuntimeError):
    """A stage failed, or a message did not come; the text names rank, stage and action."""


def _no_context(_action: Compute) -> AbstractContextManager[None]:
    return contextlib.nullcontext()


@dataclass(frozen=True)
class StageFunctions:
    """One stage, as the executor calls it.

    Attributes:
        forward: (microbatch, tensors from the stage before; none on the first) -> tensors for the next stage; on the
            last one the scalar to call backward on (ready scaled), or whatever in a program of forwards only.
        backward_weights: microbatch -> None; computes delayed weight gradients (note "Two halves").
        around_backward: context manager around each action but forwards; data parallelism sets its flags there.
    """

    forward: Callable[[int, Message], Tensor | Message]
    backward_weights: Callable[[int], None] | None = None
    around_backward: Callable[[Compute], AbstractContextManager[None]] = _no_context


@dataclass(frozen=True)
class ExecutorOptions:
    """How a program is run.

    Attributes:
        input_specs: (stage, microbatch) -> specs of the tensors that the stage gets; not asked where the channel sends
            headers.
        overlap: go on computing while messages travel; False waits for each exchange where it is posted.
        with_gradients: keep what backward needs.
    """

    input_specs: Callable[[int, int], tuple[TensorSpec, ...]] | None = None
    overlap: bool = True
    with_gradients: bool = True


@dataclass
class _Saved:
    """What a stage's backward on a microbatch needs."""

    inputs: Message
    outputs: Message


@dataclass
class _State:
    """What one run leaves between its steps."""

    arrived: dict[Transfer, tuple[Posted, int]] = field(default_factory=dict)  # receives that were posted
    made: dict[Compute, Message] = field(default_factory=dict)  # results that are still to leave
    saved: dict[tuple[int, int], _Saved] = field(default_factory=dict)
    under_way: deque[tuple[Exchange, Posted]] = field(default_factory=deque)
    in_flight: int = 0


class PipelineExecutor:
    """Runs `program` on this rank, as often as wanted.

    `recorded` are the computations of the last run in order, `peak_in_flight` the most microbatches of a stage whose
    activations were held at once in it.

    Args:
        program: of this rank (lower.py).
        shape: of the pipeline.
        rank: position of this rank in the pipeline.
        stages: the rank's stages by number.
        channel: to the other ranks; None in a pipeline of one rank.
        options: see there.
    """

    def __init__(
        self,
        program: Program,
        shape: PipelineShape,
        rank: int,
        stages: Mapping[int, StageFunctions],
        channel: Channel | None,
        options: ExecutorOptions = ExecutorOptions(),
    ) -> None:
        if set(stages) != set(shape.stages_of(rank)):
            raise ValueError(
                f"pipeline rank {rank} holds stages {shape.stages_of(rank)}, not {sorted(stages)}"
            )
        assert channel is not None or shape.num_ranks == 1, "several ranks need a channel"
        self.program = program
        self.shape, self.rank = shape, rank
        self.stages = stages
        self.channel = channel
        self.options = options
        self.recorded: list[Compute] = []
        self.peak_in_flight = 0
        self._state = _State()

    def run(self) -> None:
        """Run the whole program.

        Raises:
            PipelineError: naming rank, stage and action, if a stage raised or a peer is gone or silent.
            ValueError: a stage's own, with the same said before it.
        """
        self.recorded, self.peak_in_flight = [], 0
        self._state = _State()
        for step in self.program:
            if isinstance(step, Exchange):
                self._post(step)
            else:
                self._compute(step)
            self._reap()
        while self._state.under_way:
            self._wait(*self._state.under_way.popleft(), "at the end of the step")
        assert not (self._state.saved or self._state.made or self._state.arrived), (
            "the program left work undone"
        )

    # --- messages ------------------------------------------------------------------------------------------------

    def _post(self, exchange: Exchange) -> None:
        assert self.channel is not None
        items: list[Send | Receive] = []
        for transfer in exchange.transfers:
            if transfer.source == self.rank:
                items.append(Send(transfer.target, self._state.made.pop(transfer.producer)))
            else:
                items.append(Receive(transfer.source, self._specs(transfer)))
        with self._located(f"posting {exchange}"), record_function("pipeline.exchange"):
            posted = self.channel.post(items)
        for index, transfer in enumerate(exchange.transfers):
            if transfer.target == self.rank:
                self._state.arrived[transfer] = (posted, index)
        self._state.under_way.append((exchange, posted))
        if not self.options.overlap:
            self._wait(exchange, posted, "where it was posted")

    def _specs(self, transfer: Transfer) -> tuple[TensorSpec, ...] | None:
        assert self.channel is not None
        if self.channel.with_headers:
            return None
        producer, stage = transfer.producer, transfer.consumer_stage
        if producer.kind is not Kind.FORWARD:  # gradients look like what they are gradients of
            outputs = self._state.saved[stage, producer.microbatch].outputs
            return tuple(TensorSpec.of(tensor) for tensor in outputs if tensor.is_floating_point())
        assert self.options.input_specs is not None, "give input_specs, or a channel with headers"
        return self.options.input_specs(stage, producer.microbatch)

    def _wait(self, exchange: Exchange, posted: Posted, where: str) -> None:
        assert self.channel is not None
        with self._located(f"waiting for {_describe(exchange)} {where}"), record_function("pipeline.wait"):
            posted.wait(self.channel.timeout)

    def _reap(self) -> None:
        """Let go of exchanges that are over, and of what they sent."""
        queue = self._state.under_way
        while queue and queue[0][1].is_over():
            self._wait(*queue.popleft(), "that is over")

    def _take(self, producer: Compute) -> Message:
        """The result of `producer`, from another rank or from this one."""
        transfer = transfer_of(producer, self.shape)
        if transfer is None:
            return self._state.made.pop(producer)
        posted, index = self._state.arrived.pop(transfer)
        self._wait(Exchange((transfer,)), posted, "")
        message = posted.received[index]
        assert message is not None
        posted.received[index] = None
        return message

    def _leave(self, action: Compute, message: Message) -> None:
        """Keep what `action` made until it is sent or taken; nothing if nobody needs it."""
        next_stage = action.stage + (1 if action.kind is Kind.FORWARD else -1)
        if 0 <= next_stage < self.shape.num_stages:
            self._state.made[action] = message

    # --- computations --------------------------------------------------------------------------------------------

    def _compute(self, action: Compute) -> None:
        run = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.INPUT: self._backward,
            Kind.WEIGHT: self._weights,
        }[action.kind]
        with self._located(f"stage {action.stage}, {_WORDS[action.kind]} of microbatch {action.microbatch}"):
            run(action)
        self.recorded.append(action)
        if action.kind in (Kind.BACKWARD, Kind.WEIGHT):
            self._state.in_flight -= 1

    def _forward(self, action: Compute) -> None:
        stage, microbatch = action.stage, action.microbatch
        inputs: Message = ()
        if stage > 0:
            inputs = self._take(Compute(Kind.FORWARD, stage - 1, microbatch))
        gradients = self.options.with_gradients
        inputs = tuple(
            tensor.detach().requires_grad_(gradients and tensor.is_floating_point()) for tensor in inputs
        )
        self._state.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self._state.in_flight)
        with record_function(f"pipeline.forward {stage} {microbatch}"), torch.set_grad_enabled(gradients):
            result = self.stages[stage].forward(microbatch, inputs)
        outputs = (result,) if isinstance(result, Tensor) else tuple(result)
        if gradients:
            self._state.saved[stage, microbatch] = _Saved(inputs, outputs)
        else:
            self._state.in_flight -= 1
        self._leave(action, tuple(tensor.detach() for tensor in outputs))

    def _backward(self, action: Compute) -> None:
        stage, microbatch = action.stage, action.microbatch
        gradients: Sequence[Tensor | None] | None = None
        if stage < self.shape.num_stages - 1:
            gradients = self._take(Compute(action.kind, stage + 1, microbatch))
        saved = self._state.saved.pop((stage, microbatch))
        if gradients is None:
            roots: list[tuple[Tensor, Tensor | None]] = [(output, None) for output in saved.outputs]
        else:
            floating = [output for output in saved.outputs if output.is_floating_point()]
            roots = list(zip(floating, gradients, strict=True))
        roots = [(output, gradient) for output, gradient in roots if output.requires_grad]
        name = f"pipeline.backward {stage} {microbatch}"
        with record_function(name), self.stages[stage].around_backward(action):
            if roots:
                torch.autograd.backward([output for output, _ in roots], [gradient for _, gradient in roots])
        found = [
            torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for tensor in saved.inputs
            if tensor.is_floating_point()
        ]
        self._leave(action, tuple(found))

    def _weights(self, action: Compute) -> None:
        functions = self.stages[action.stage]
        if functions.backward_weights is None:
            return
        name = f"pipeline.weights {action.stage} {action.microbatch}"
        with record_function(name), functions.around_backward(action):
            functions.backward_weights(action.microbatch)

    @contextlib.contextmanager
    def _located(self, what: str) -> Iterator[None]:
        """Name rank and action in whatever goes wrong inside."""
        try:
            yield
        except PipelineError:
            raise
        except ValueError as error:
            error.args = (f"pipeline rank {self.rank}, {what}: {error}",)  # raised where it was, says more
            raise
        except Exception as error:
            raise PipelineError(
                f"pipeline rank {self.rank}, {what}: {type(error).__name__}: {error}{self._last()}"
            ) from error

    def _last(self) -> str:
        return f" (done last: {self.recorded[-1]})" if self.recorded else ""


def _describe(exchange: Exchange) -> str:
    return " and ".join(
        f"{'hidden states' if transfer.producer.kind is Kind.FORWARD else 'gradients'} of microbatch "
        f"{transfer.producer.microbatch} from rank {transfer.source} to stage {transfer.consumer_stage} on rank "
        f"{transfer.target}"
        for transfer in exchange.transfers
    )
