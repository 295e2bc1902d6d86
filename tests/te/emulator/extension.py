"""The module that stands in for `transformer_engine_torch`."""

from __future__ import annotations

import importlib.machinery
import types
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from tests.te.emulator import activations, float8, gemm, norms, softmax, tensors
from tests.te.emulator.values import (
    CLASSES,
    CONSTANT_FUNCTIONS,
    OPEN_ENUMS,
    fused_attention_backend,
    open_enum,
    refuse,
)

NAME = "transformer_engine_torch"


class Extension(types.ModuleType):
    """Names it does not have can be imported, because TE imports more than it calls; calling one is refused.

    calls: how often each kernel ran. gemm_log: each GEMM.
    """

    calls: Counter[str]
    gemm_log: gemm.GemmLog

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*args: Any, **kwargs: Any) -> None:
            refuse(f"{NAME}.{name}")

        missing.__name__ = name
        setattr(self, name, missing)
        return missing


def _kernels() -> dict[str, Callable[..., Any]]:
    groups = (*gemm.FUNCTIONS, *norms.FUNCTIONS, *softmax.FUNCTIONS, *tensors.FUNCTIONS, *float8.FUNCTIONS)
    kernels: dict[str, Callable[..., Any]] = {function.__name__: function for function in groups}
    kernels.update(activations.functions())
    kernels.update(dict.fromkeys(softmax.BACKWARD_NAMES, softmax.softmax_backward))
    return kernels


def _counted(name: str, kernel: Callable[..., Any], calls: Counter[str]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        with torch.no_grad():  # a kernel is opaque to autograd
            return kernel(*args, **kwargs)

    run.__name__ = name
    return run


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def build(te_version: tuple[int, ...]) -> Extension:
    """A fresh emulated extension for this version of Transformer Engine, e.g. (2, 20)."""
    extension = Extension(NAME, "CPU emulator of Transformer Engine's PyTorch extension")
    extension.calls, extension.gemm_log = Counter(), gemm.LOG
    names: dict[str, Any] = {name: open_enum(name) for name in OPEN_ENUMS}
    names.update(CLASSES)
    names.update({name: _constant(value) for name, value in CONSTANT_FUNCTIONS.items()})
    backend = names["NVTE_Fused_Attn_Backend"] = fused_attention_backend(te_version)
    names["get_fused_attn_backend"] = _constant((backend["NVTE_No_Backend"], "CPU emulator"))
    names.update({name: _counted(name, kernel, extension.calls) for name, kernel in _kernels().items()})
    extension.__dict__.update(names)
    extension.__file__ = __file__
    extension.__spec__ = importlib.machinery.ModuleSpec(NAME, loader=None)  # for importlib.util.find_spec
    return extension
