"""A tensor that is made when it is read, and not kept: how a model larger than memory goes into a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


class DeferredTensor(Tensor):
    """Has shape and dtype; any operation on it, detach too, calls `make` and works on what that returns.

    torch.distributed.checkpoint asks for a tensor's values when it writes them, one tensor at a time.
    """

    _make: Callable[[], Tensor]

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, make: Callable[[], Tensor]) -> DeferredTensor:
        """A tensor on CPU of `shape` and `dtype`, which are those of what `make` returns."""
        deferred = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=torch.device("cpu"))
        deferred._make = make
        return deferred

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Work on the values."""
        if func is torch.ops.aten.is_pinned.default:
            return False  # asked for by torch.distributed.checkpoint's plan, for which no values are needed
        return func(*tree_map(values_of, args), **tree_map(values_of, dict(kwargs or {})))

    def __repr__(self) -> str:  # type: ignore[override]
        """Without making the values."""
        return f"DeferredTensor({list(self.shape)}, {self.dtype})"


def values_of(item: Any) -> Any:
    """The values of a deferred tensor; anything else as it is."""
    if not isinstance(item, DeferredTensor):
        return item
    made = item._make()
    assert made.shape == item.shape and made.dtype == item.dtype, f"{item} became {made.shape} {made.dtype}"
    return made
