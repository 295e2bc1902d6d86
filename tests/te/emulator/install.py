"""Import the real transformer_engine.pytorch over the emulated extension."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.te.emulator import extension, triton_stub
from tests.te.emulator.proxy import TorchModule, patch_tensor_methods, rebind

HOPPER = (9, 0)
"""Compute capability of the pretended device. With the CUDA version of proxy.py, TE itself refuses MXFP8,
FP4 and FP8 in blocks, which are not emulated.
"""

DEFAULTS = {
    "NVTE_TORCH_COMPILE": "0",  # no torch.compile of small helpers
    "NVTE_FLASH_ATTN": "0",
    "NVTE_FUSED_ATTN": "0",
}
LOADING = {"NVTE_PROJECT_BUILDING": "1", "NVTE_FRAMEWORK": "none"}
"""With these, transformer_engine/common skips its sanity checks and loads no shared object."""


def install(capability: tuple[int, int] = HOPPER) -> types.ModuleType:
    """Return transformer_engine.pytorch, made importable by the emulator; further calls return the same
    module.

    Raises RuntimeError when transformer_engine was imported before: its modules hold the unpatched torch
    then.
    """
    loaded = sys.modules.get(extension.NAME)
    if isinstance(loaded, extension.Extension):
        return sys.modules["transformer_engine.pytorch"]
    if any(name.split(".")[0] in ("transformer_engine", extension.NAME) for name in sys.modules):
        raise RuntimeError("the emulator must be installed before the first import of transformer_engine")
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    _load_torch_parts()
    emulated = extension.build(_version())
    proxy = TorchModule(capability)
    with _environment(LOADING), _modules(triton_stub.modules()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        te = _import(emulated)
    rebind(proxy)
    distributed: Any = sys.modules["transformer_engine.pytorch.distributed"]
    distributed._lazy_init = lambda: (
        None
    )  # the checkpoint's random state: there is no CUDA context to wait for
    distributed._lazy_call = lambda function, **options: function()
    return te


def _version() -> tuple[int, ...]:
    """(major, minor) of the wheel that the next import finds."""
    return tuple(int(part) for part in importlib.metadata.version("transformer_engine").split(".")[:2])


def _load_torch_parts() -> None:
    """Parts of torch that ask for triton must do so before the hollow one stands there."""
    for name in ("torch._dynamo", "torch._inductor", "torch.utils._triton"):
        importlib.import_module(name)
    torch.utils._triton.has_triton_package()  # type: ignore[attr-defined]  # caches the true answer


def _import(emulated: extension.Extension) -> types.ModuleType:
    """First .common loads and .pytorch stops at the missing extension, which TE swallows; then .pytorch for
    real.
    """
    import transformer_engine

    common: Any = sys.modules["transformer_engine.common"]
    common.load_framework_extension = lambda framework: sys.modules.__setitem__(extension.NAME, emulated)
    patch_tensor_methods()
    for name in [n for n in sys.modules if n.startswith("transformer_engine.pytorch")]:
        del sys.modules[name]
    te = importlib.import_module("transformer_engine.pytorch")
    transformer_engine.pytorch = te
    return te


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _modules(modules: dict[str, types.ModuleType]) -> Iterator[None]:
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            sys.modules.pop(name, None)
