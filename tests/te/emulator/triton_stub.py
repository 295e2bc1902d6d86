"""A hollow triton, present only while TE is imported: TE decorates kernels then that are never run here."""

from __future__ import annotations

import importlib.util
import types
from typing import Any


class _Hollow(types.ModuleType):
    """Every attribute and every call is the module itself, so annotations such as `tl.constexpr` evaluate."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__


def _decorator(*args: Any, **kwargs: Any) -> Any:
    if len(args) == 1 and callable(args[0]) and not kwargs:
        return args[0]
    return lambda function: function


def modules() -> dict[str, types.ModuleType]:
    """Name -> module to put into sys.modules; empty where triton is installed."""
    if importlib.util.find_spec("triton") is not None:
        return {}
    triton, language = _Hollow("triton"), _Hollow("triton.language")
    triton.jit = triton.autotune = triton.heuristics = _decorator
    triton.__version__, triton.language, triton.__path__ = "3.0.0", language, []
    language.__path__ = []
    found: dict[str, types.ModuleType] = {"triton": triton, "triton.language": language}
    found.update(
        {f"triton.language.{name}": _Hollow(f"triton.language.{name}") for name in ("core", "standard")}
    )
    return found
