"""The streams that FSDP's work runs on, behind one object.

On CUDA: compute (the caller's), gather and reduce. A buffer is allocated and freed on the stream that owns it and is
handed over by events only. On CPU there are no streams; the object only keeps the order of launches, compute and waits,
which is what overlap on a GPU follows from, so that it can be tested without one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch


@dataclass
class EventLog:
    """Order of what happened: (event, unit name). Empty unless `enabled`."""

    enabled: bool = False
    events: list[tuple[str, str]] = field(default_factory=list)

    def add(self, event: str, name: str) -> None:
        """Append an event."""
        if self.enabled:
            self.events.append((event, name))


class Streams:
    """CPU version: everything runs in program order."""

    def __init__(self) -> None:
        self.log = EventLog()

    def begin_step(self) -> None:
        """Main parameters as they are now are what the next gathers read."""

    @contextlib.contextmanager
    def gather(self) -> Iterator[None]:
        """Run the body on the gather stream."""
        yield

    @contextlib.contextmanager
    def reduce(self) -> Iterator[None]:
        """Run the body on the reduce stream, after what the current stream has launched so far."""
        yield

    def wait_gather(self) -> None:
        """Let compute wait for the gathers launched so far."""

    def before_release(self) -> None:
        """Let the gather stream reuse memory only after the compute launched so far."""

    def wait_reduce(self) -> None:
        """Let compute wait for the reductions launched so far."""


class CudaStreams(Streams):
    """CUDA version: a gather and a reduce stream beside the current one."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._gather = torch.cuda.Stream(device, priority=-1)
        self._reduce = torch.cuda.Stream(device, priority=-1)

    def begin_step(self) -> None:
        """Gathers wait for the compute launched so far (the optimizer step)."""
        self._gather.wait_stream(torch.cuda.current_stream())

    @contextlib.contextmanager
    def gather(self) -> Iterator[None]:
        """Run the body on the gather stream."""
        with torch.cuda.stream(self._gather):
            yield

    @contextlib.contextmanager
    def reduce(self) -> Iterator[None]:
        """Run the body on the reduce stream, after the stream that computed the (delayed) wgrads."""
        self._reduce.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._reduce):
            yield

    def wait_gather(self) -> None:
        """Let compute wait for the gathers launched so far."""
        torch.cuda.current_stream().wait_stream(self._gather)

    def before_release(self) -> None:
        """The gather stream owns gathered storage: it waits until compute has used it."""
        self._gather.wait_stream(torch.cuda.current_stream())

    def wait_reduce(self) -> None:
        """Let compute wait for the reductions launched so far."""
        torch.cuda.current_stream().wait_stream(self._reduce)


def make_streams(device: torch.device) -> Streams:
    """Return the streams for `device`."""
    return CudaStreams(device) if device.type == "cuda" else Streams()
