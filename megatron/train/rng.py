"""The random state of this rank: captured in a checkpoint, put back at a resume.

Python's and numpy's generators, torch's default ones (CPU, this rank's GPU), and the streams that layers
fork for dropout under tensor parallelism.
"""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy
import torch

from megatron.parallel.random import RngStreams


def capture(streams: RngStreams | None, device: torch.device) -> bytes:
    """The state of every generator that this rank draws from, as bytes for a checkpoint."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    if streams is not None:
        state["streams"] = streams.state()
    return pickle.dumps(state)


def restore(saved: bytes, streams: RngStreams | None, device: torch.device) -> None:
    """Put back what `capture` returned; what either side lacks is left alone."""
    state = pickle.loads(saved)
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    if streams is not None and "streams" in state:
        streams.load_state(state["streams"])
