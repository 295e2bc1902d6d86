"""Where what a TE layer returns differs from the protocol."""

from __future__ import annotations

from typing import Any

from torch import nn


def without_bias(module: nn.Module, wanted: bool) -> nn.Module:
    """With return_bias=True and bias=False TE returns an empty tensor; the protocol says None. Returns `module`."""
    if wanted:
        module.register_forward_hook(_insert_none)
    return module


def _insert_none(module: nn.Module, args: Any, out: Any) -> tuple[Any, ...]:
    return (out[0], None, *out[1:]) if isinstance(out, tuple) else (out, None)
