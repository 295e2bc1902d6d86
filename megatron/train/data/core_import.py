"""The gate to megatron-core's datasets: imported late, quietly, and with what its import trips over put
right.

Importing megatron.core takes seconds, warns about every optional package, and fails outright where the pure
``transformer_engine`` wheel is installed without its compiled part (that import raises RuntimeError, and
megatron.core expects ImportError). Its compiled index helpers may be missing where it was installed without a
compiler.
"""

from __future__ import annotations

import importlib
import logging
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_HELPERS = "megatron.core.datasets.helpers_cpp"


def import_core_datasets() -> None:
    """Import megatron.core.datasets, after which plain imports of its modules work and say nothing.

    Raises:
        ValueError: megatron-core is not installed.
    """
    if "megatron.core.datasets.gpt_dataset" in sys.modules and _HELPERS in sys.modules:
        return
    with quiet_core(), _without_compiler():
        try:
            importlib.import_module("megatron.core")
        except ModuleNotFoundError as error:
            if error.name not in ("megatron.core", "megatron"):
                raise
            raise ValueError(
                "megatron-core is not installed: pip install megatron-core (it reads the data)"
            ) from None
        except (RuntimeError, OSError, AssertionError):
            # A half installed Transformer Engine (which megatron.core imports): hide it for this import only.
            _forget("megatron.core")
            with _hidden("transformer_engine"):
                importlib.import_module("megatron.core")
        _import_helpers()
        importlib.import_module("megatron.core.datasets.gpt_dataset")
        importlib.import_module("megatron.core.datasets.blended_megatron_dataset_builder")
    # From here on its modules log at INFO and WARNING about each step; errors are raised anyway.
    logging.getLogger("megatron.core.datasets").setLevel(logging.ERROR)


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Make torch.compile a no-op: megatron-core decorates functions that datasets never call, and the first
    use of torch.compile imports the whole compiler (4 s of CPU time on every rank).
    """
    compile_ = torch.compile
    torch.compile = lambda model=None, **_: model or (lambda function: function)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile_  # type: ignore[assignment]


@contextmanager
def quiet_core() -> Iterator[None]:
    """Silence megatron-core's warnings and log records inside the block, nothing outside it."""
    logger = logging.getLogger("megatron.core")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def _hidden(package: str) -> Iterator[None]:
    kept = {name: module for name, module in sys.modules.items() if _inside(name, package)}
    for name in kept:
        del sys.modules[name]
    sys.modules[package] = None  # type: ignore[assignment]  # the import system's own way to say "not there"
    try:
        yield
    finally:
        del sys.modules[package]
        sys.modules.update(kept)


def _forget(package: str) -> None:
    for name in [name for name in sys.modules if _inside(name, package)]:
        del sys.modules[name]


def _inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def _import_helpers() -> None:
    """Take the compiled helpers, or put our NumPy ones in their place."""
    try:
        importlib.import_module(_HELPERS)
    except ImportError:
        from megatron.train.data import index_helpers

        module = types.ModuleType(_HELPERS, index_helpers.__doc__)
        for name in index_helpers.REPLACES:
            setattr(module, name, getattr(index_helpers, name))
        sys.modules[_HELPERS] = module
