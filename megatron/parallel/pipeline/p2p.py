"""Messages between pipeline ranks: tensors of any dtype, sent and received without waiting.

Note "What travels": a message is one or more tensors. Where shapes are fixed both ends know their specs; else a header
of eight-byte integers goes ahead, and the receiver waits for it where it posts the receive. Ranks post in an order in
which that cannot deadlock (lower.py). Tensors travel as they lie in memory, so any dtype does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.parallel.flight import MESSAGES, RECORDER, Flight

Message = tuple[Tensor, ...]

_MAX_TENSORS, _MAX_DIMS = 8, 8
_FIELDS = 2 + _MAX_DIMS  # dtype, number of dims, sizes
_HEADER = 1 + _MAX_TENSORS * _FIELDS
_DTYPES: tuple[torch.dtype, ...] = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor that is sent."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """The spec of `tensor`."""
        return cls(tuple(tensor.shape), tensor.dtype)


@dataclass(frozen=True)
class Send:
    """A message for the rank at position `peer` of the group."""

    peer: int
    message: Message


@dataclass(frozen=True)
class Receive:
    """A message from `peer`. specs: of its tensors; None: a header says."""

    peer: int
    specs: tuple[TensorSpec, ...] | None


class Posted:
    """An exchange under way. Keeps what is sent alive."""

    def __init__(
        self,
        works: Sequence[Any],
        received: list[Message | None],
        sent: Sequence[Tensor],
        flight: Flight | None = None,
    ) -> None:
        self._flight = flight
        self._works = list(works)
        self._sent = list(sent)
        self.received = received

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait until everything has arrived and left (on a GPU: until the current stream may use it).

        Raises RuntimeError if a peer is gone or the time is over.
        """
        if self._flight is not None:
            RECORDER.waiting(self._flight)
        while self._works:
            work = self._works[0]
            work.wait(timeout) if timeout is not None else work.wait()
            self._works.pop(0)
        if self._flight is not None:
            RECORDER.ended(self._flight)
        self._sent.clear()

    def is_over(self) -> bool:
        """Whether `wait` would return at once."""
        return all(work.is_completed() for work in self._works)


class Channel:
    """Exchanges messages with the other ranks of `group`; all ranks must post in one order (lower.py).

    Collective over the group.

    Args:
        group: the pipeline's.
        device: where messages lie.
        with_headers: shapes differ from message to message.
        timeout: for waiting; None: the group's.
    """

    def __init__(
        self,
        group: ProcessGroup,
        device: torch.device,
        *,
        with_headers: bool = False,
        timeout: timedelta | None = None,
    ) -> None:
        self.group = group
        self._ranks = dist.get_process_group_ranks(group)
        self.device = device
        if dist.get_backend(group) != "gloo":
            # The first call on a communicator makes it, and only one that all its ranks take part in may.
            dist.all_reduce(torch.zeros(1, device=device), group=group)
        self.with_headers = with_headers
        self.timeout = timeout

    def post(self, exchange: Sequence[Send | Receive]) -> Posted:
        """Start all sends and receives of `exchange` as one batch. With headers, wait for those that come in.

        Returns what is under way; `received` has a message for each Receive, None for each Send.
        """
        headers = self._exchange_headers(exchange) if self.with_headers else None
        operations: list[dist.P2POp] = []
        received: list[Message | None] = []
        sent: list[Tensor] = []
        for index, item in enumerate(exchange):
            if isinstance(item, Send):
                tensors = tuple(tensor.detach().contiguous() for tensor in item.message)
                received.append(None)
                sent += tensors
            else:
                specs = item.specs if headers is None else headers[index]
                assert specs is not None, "a message of unknown shape needs a header"
                tensors = tuple(
                    torch.empty(spec.shape, dtype=spec.dtype, device=self.device) for spec in specs
                )
                received.append(tensors)
            operation = dist.isend if isinstance(item, Send) else dist.irecv
            operations += [
                self._operation(operation, tensor, item.peer) for tensor in tensors if tensor.numel()
            ]
        return self._start(operations, exchange, received, sent)

    def _start(
        self,
        operations: list[dist.P2POp],
        exchange: Sequence[Send | Receive],
        received: list[Message | None],
        sent: Sequence[Tensor],
    ) -> Posted:
        if not operations:
            return Posted([], received, sent)
        peers = ", ".join(
            f"{'to' if isinstance(item, Send) else 'from'} rank {self._ranks[item.peer]}" for item in exchange
        )
        tensors = [operation.tensor for operation in operations]
        flight = RECORDER.launched("messages", self.group, tensors, peers, MESSAGES)
        return Posted(dist.batch_isend_irecv(operations), received, sent, flight)

    def _operation(self, operation: Any, tensor: Tensor, peer: int) -> dist.P2POp:
        flat = tensor.reshape(-1).view(torch.uint8) if tensor.dtype in _AS_BYTES else tensor
        return dist.P2POp(operation, flat, group=self.group, group_peer=peer)

    def _exchange_headers(self, exchange: Sequence[Send | Receive]) -> list[tuple[TensorSpec, ...] | None]:
        headers = [
            encode_header([TensorSpec.of(tensor) for tensor in item.message], self.device)
            if isinstance(item, Send)
            else torch.empty(_HEADER, dtype=torch.int64, device=self.device)
            for item in exchange
        ]
        operations = [
            self._operation(dist.isend if isinstance(item, Send) else dist.irecv, header, item.peer)
            for item, header in zip(exchange, headers, strict=True)
        ]
        self._start(operations, exchange, [], headers).wait(self.timeout)
        return [decode_header(header) if isinstance(item, Receive) else None
                for item, header in zip(exchange, headers, strict=True)]  # fmt: skip


# Not all backends know these; their bytes always travel.
_AS_BYTES = {
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int16,
    torch.complex64,
    torch.complex128,
}


def encode_header(specs: Sequence[TensorSpec], device: torch.device | str = "cpu") -> Tensor:
    """Specs as one int64 tensor of fixed size.

    Raises ValueError for more than 8 tensors or dims, or a dtype without a number.
    """
    if len(specs) > _MAX_TENSORS or any(len(spec.shape) > _MAX_DIMS for spec in specs):
        raise ValueError(
            f"a pipeline message has at most {_MAX_TENSORS} tensors of {_MAX_DIMS} dims: {specs}"
        )
    numbers = [len(specs)]
    for spec in specs:
        if spec.dtype not in _DTYPES:
            raise ValueError(f"pipeline messages of {spec.dtype} need fixed shapes")
        padding = [0] * (_MAX_DIMS - len(spec.shape))
        numbers += [_DTYPES.index(spec.dtype), len(spec.shape), *spec.shape, *padding]
    numbers += [0] * (_HEADER - len(numbers))
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def decode_header(header: Tensor) -> tuple[TensorSpec, ...]:
    """What `encode_header` was given."""
    count, *numbers = header.tolist()
    specs = []
    for index in range(count):
        dtype, dims, *sizes = numbers[index * _FIELDS : (index + 1) * _FIELDS]
        specs.append(TensorSpec(tuple(sizes[:dims]), _DTYPES[dtype]))
    return tuple(specs)
