"""The pool of processes that have megatron-core on CPU. The process of pytest never imports it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

from tests.pool import Pool


def _prepare_worker() -> None:
    from tests.mcore.shim import install

    install()


POOL = Pool(initializer=_prepare_worker)


def run_mcore_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60
) -> list[Any]:
    """tests.pool.run_ranks in processes that have megatron-core on CPU."""
    if importlib.util.find_spec("megatron.core") is None:
        pytest.skip("megatron-core is not installed (pip install --no-deps megatron-core==0.16.1)")
    return POOL.run(function, world_size, *args, timeout=timeout)
