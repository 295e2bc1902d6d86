"""The streams that FSDP's work runs on, behind one object.

Three streams: compute (the caller's), gather and reduce. Communication itself runs on its backend's own streams, which
wait for the stream that launches and are waited for through the handle of the launch.

Note [Which stream waits for which]
A buffer is allocated and freed on the stream that owns it, and handed over by events only:
- gathered parameters belong to the gather stream: compute waits for it before it reads them, and it waits for compute
  before it reuses what was released;
- main parameters belong to compute: the gather stream waits for it at the begin of a step;
- gradient buffers that layers write belong to compute, what comes of a reduction to the reduce stream: that waits for
  compute whenever it is entered, and compute waits for it before it lets go of what was reduced.

These rules are here once. On CUDA `CudaStreams` carries them out; on CPU everything runs in program order and `Streams`
only tells a `recorder`, if there is one, what would run where, so that races and overlap are tested without a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch

COMPUTE, GATHER, REDUCE = "compute", "gather", "reduce"


class StreamRecorder(Protocol):
    """Is told what would run on which stream."""

    def use(self, stream: str) -> None:
        """What is launched from now on runs on `stream`."""

    def wait(self, waiter: str, waited: str) -> None:
        """What `waiter` gets from now on runs after all that `waited` has got so far."""


@dataclass
class EventLog:
    """Order of launches: (event, unit name), kept if `enabled`. `watch` sees each as it comes."""

    enabled: bool = False
    events: list[tuple[str, str]] = field(default_factory=list)
    watch: Callable[[str, str], None] | None = None

    def add(self, event: str, name: str) -> None:
        """Append an event."""
        if self.enabled:
            self.events.append((event, name))
        if self.watch is not None:
            self.watch(event, name)


class Streams:
    """The rules of Note [Which stream waits for which]; on CPU nothing has to be done for them."""

    def __init__(self) -> None:
        self.log = EventLog()
        self.recorder: StreamRecorder | None = None
        self._current = COMPUTE

    def begin_step(self) -> None:
        """Main parameters as they are now are what the next gathers read."""
        self._wait(GATHER, self._current)

    @contextlib.contextmanager
    def gather(self) -> Iterator[None]:
        """Run the body on the gather stream."""
        with self._on(GATHER):
            yield

    @contextlib.contextmanager
    def reduce(self) -> Iterator[None]:
        """Run the body on the reduce stream, after what the current stream has launched so far.

        The current stream is the one that computed the (delayed) wgrads, which need not be autograd's.
        """
        self._wait(REDUCE, self._current)
        with self._on(REDUCE):
            yield

    def wait_gather(self) -> None:
        """Let compute wait for the gathers launched so far."""
        self._wait(self._current, GATHER)

    def before_release(self) -> None:
        """Let the gather stream reuse memory only after the compute launched so far."""
        self._wait(GATHER, self._current)

    def wait_reduce(self) -> None:
        """Let compute wait for the reductions launched so far."""
        self._wait(self._current, REDUCE)

    # --- how: here only told to the recorder -----------------------------------------------------------------

    @contextlib.contextmanager
    def _on(self, stream: str) -> Iterator[None]:
        """Make `stream` the current one for the body."""
        before, self._current = self._current, stream
        if self.recorder is not None:
            self.recorder.use(stream)
        try:
            yield
        finally:
            self._current = before
            if self.recorder is not None:
                self.recorder.use(before)

    def _wait(self, waiter: str, waited: str) -> None:
        """Let `waiter` wait for what `waited` has got so far."""
        if self.recorder is not None and waiter != waited:
            self.recorder.wait(waiter, waited)


class CudaStreams(Streams):
    """CUDA: a gather and a reduce stream beside the caller's current one."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._streams = {
            GATHER: torch.cuda.Stream(device, priority=-1),
            REDUCE: torch.cuda.Stream(device, priority=-1),
        }

    @contextlib.contextmanager
    def _on(self, stream: str) -> Iterator[None]:
        with super()._on(stream), torch.cuda.stream(self._streams[stream]):
            yield

    def _wait(self, waiter: str, waited: str) -> None:
        super()._wait(waiter, waited)
        if waiter != waited:
            self._of(waiter).wait_stream(self._of(waited))

    def _of(self, stream: str) -> torch.cuda.Stream:
        return self._streams[stream] if stream in self._streams else torch.cuda.current_stream()


def make_streams(device: torch.device) -> Streams:
    """Return the streams for `device`."""
    return CudaStreams(device) if device.type == "cuda" else Streams()
