"""Random streams per parallel axis, and recompute that replays them.

Note "Streams": the default generator of a rank is seeded alike over the tensor-parallel ranks (they hold the
same hidden states and must drop the same ones) and differently over data, context and pipeline. Inside
`fork()` it runs on
another stream: TENSOR differs between tensor-parallel ranks as well (heads, pieces of the sequence), EXPERT
    between
the ranks of the expert view.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from megatron.parallel.mesh import ParallelMesh

DEFAULT = "default"
TENSOR = "tensor"
EXPERT = "expert"

# The axes that tell the ranks of a stream apart.
STREAM_AXES: dict[str, tuple[str, ...]] = {
    DEFAULT: ("pp", "dp", "cp"),
    TENSOR: ("pp", "dp", "cp", "tp"),
    EXPERT: ("pp", "edp", "ep", "etp"),
}


class RngStreams:
    """Named random streams of one rank, beside the default generator of its device.

    Args:
        device_type: "cpu" or "cuda": whose default generator `fork` switches.
    """

    def __init__(self, device_type: str = "cpu") -> None:
        self._generator_state = _GENERATOR_STATE[device_type]
        self._states: dict[str, Tensor] = {}

    @classmethod
    def for_mesh(cls, seed: int, mesh: ParallelMesh, device_type: str | None = None) -> RngStreams:
        """Seed the default generators of this process and make the streams of STREAM_AXES."""
        streams = cls(device_type or mesh.device_type)
        torch.manual_seed(stream_seed(seed, DEFAULT, mesh))
        for name in (TENSOR, EXPERT):
            streams.add(name, stream_seed(seed, name, mesh))
        return streams

    def add(self, name: str, seed: int) -> None:
        """Add a stream; ValueError where the name is taken."""
        if name in self._states:
            raise ValueError(f"the random stream {name!r} exists already")
        get, put = self._generator_state
        before = get()
        torch.manual_seed(seed) if put is torch.set_rng_state else torch.cuda.manual_seed(seed)
        self._states[name] = get()
        put(before)

    @contextmanager
    def fork(self, name: str = TENSOR) -> Iterator[None]:
        """Run the default generator on stream `name`; it goes on later where this leaves off."""
        if name not in self._states:
            raise ValueError(f"unknown random stream {name!r}; there are {', '.join(self._states) or 'none'}")
        get, put = self._generator_state
        before = get()
        put(self._states[name])
        try:
            yield
        finally:
            self._states[name] = get()
            put(before)

    def state(self) -> dict[str, Tensor]:
        """State of every stream (not of the default generator), by name; checkpoints keep it per rank."""
        return dict(self._states)

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` gave; ValueError for other streams."""
        if state.keys() != self._states.keys():
            raise ValueError(f"random streams {sorted(state)} do not match this run's {sorted(self._states)}")
        self._states = dict(state)


_GENERATOR_STATE: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], None]]] = {
    "cpu": (torch.get_rng_state, torch.set_rng_state),
    "cuda": (torch.cuda.get_rng_state, torch.cuda.set_rng_state),
}


def stream_seed(seed: int, name: str, mesh: ParallelMesh) -> int:
    """Seed of stream `name` here: a hash of the run's seed, the name and the place on STREAM_AXES[name]."""
    place = [(axis, mesh.rank(axis)) for axis in STREAM_AXES[name]]
    digest = hashlib.blake2b(repr((seed, name, place)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def checkpoint(
    function: Callable[..., Any], *args: Any, streams: RngStreams | None = None, use_reentrant: bool = False
) -> Any:
    """function(*args), recomputed in backward with the random numbers that forward had, in every stream."""
    function = replaying(function, streams)
    return torch_checkpoint(function, *args, use_reentrant=use_reentrant, preserve_rng_state=True)


def replaying(function: Callable[..., Any], streams: RngStreams | None) -> Callable[..., Any]:
    """`function` for one forward and its recompute: the second call draws from the streams what the first did."""
    return function if streams is None else _Replay(function, streams)


class _Replay:
    """Calls a function; from the second call on, with the streams as they were at the first."""

    def __init__(self, function: Callable[..., Any], streams: RngStreams) -> None:
        self._function, self._streams = function, streams
        self._before: dict[str, Tensor] | None = None

    def __call__(self, *args: Any) -> Any:
        if self._before is None:
            self._before = self._streams.state()
            return self._function(*args)
        now = self._streams.state()
        self._streams.load_state(self._before)
        try:
            return self._function(*args)
        finally:
            self._streams.load_state(now)
