"""Our random streams behind the interface of TE's CudaRNGStatesTracker."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.parallel.random import RngStreams


class EngineRng:
    """What TE asks of a tracker: `fork` around dropout, and states, which it saves around a recompute.

    The states are saved and restored by our own checkpoint contexts, so TE is told that there are none.
    """

    def __init__(self, streams: RngStreams) -> None:
        self._streams = streams

    def fork(self, name: str = "model-parallel-rng") -> AbstractContextManager[Any]:
        """Context in which dropout draws from this tensor-parallel rank's stream."""
        return self._streams.fork()

    def get_states(self) -> dict[str, Any]:
        """See the class."""
        return {}

    def set_states(self, states: dict[str, Any]) -> None:
        """See the class."""
