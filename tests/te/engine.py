"""Where tests get Transformer Engine from, and the pool of processes that have it.

With a compiled TE and a CUDA device the real thing runs on "cuda"; else TE's Python modules run on "cpu" over
the emulator. Either way TE is imported only in this pool's workers: the emulator patches torch, and the
process of pytest stays as it is.

    @in_te_process
    def test_something(dtype_name):        # runs in a worker; the module imports nothing of TE at its top
        te = load()
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.pool import Pool

NO_TE = "transformer_engine is not installed (pip install --no-deps transformer_engine==2.20.2)"


def compiled() -> bool:
    """Whether a compiled Transformer Engine and a CUDA device are here."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine_torch") is not None


def device() -> str:
    """Where modules under test live."""
    return "cuda" if compiled() else "cpu"


def load() -> Any:
    """transformer_engine.pytorch: the compiled one, else over the emulator. Not for the process of pytest."""
    if compiled():
        return importlib.import_module("transformer_engine.pytorch")
    from tests.te.emulator import install

    return install()


def _prepare_worker() -> None:
    load()


POOL = Pool(initializer=_prepare_worker)


def run_te_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60) -> list[Any]:
    """tests.pool.run_ranks in processes that have Transformer Engine."""
    if importlib.util.find_spec("transformer_engine") is None:
        pytest.skip(NO_TE)
    if compiled() and world_size > torch.cuda.device_count():
        pytest.skip(f"{world_size} ranks need as many GPUs; here are {torch.cuda.device_count()}")
    return POOL.run(function, world_size, *args, timeout=timeout)


def in_te_process(test: Callable[..., None]) -> Callable[..., None]:
    """Make a test function run in a process that has Transformer Engine. Its arguments must be picklable."""

    @functools.wraps(test)
    def send(**arguments: Any) -> None:
        run_te_ranks(_run_test, 1, test.__module__, test.__name__, arguments)

    return send


def _run_test(rank: int, world_size: int, module: str, name: str, arguments: dict[str, Any]) -> None:
    torch.manual_seed(0)
    getattr(importlib.import_module(module), name).__wrapped__(**arguments)


def extension() -> types.ModuleType:
    """The (emulated or compiled) extension module."""
    load()
    return importlib.import_module("transformer_engine_torch")
