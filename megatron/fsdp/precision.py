"""Mixed precision: which dtype parameters, computation, communication and gradients have."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Same fields and meanings as `torch.distributed.fsdp.MixedPrecisionPolicy`.

    Attributes:
        param_dtype: dtype in which a module computes; None keeps each parameter's own dtype.
        reduce_dtype: dtype of gradients on the wire; None means `param_dtype`, or the parameter's own.
        output_dtype: dtype that floating-point outputs of a unit are cast to; None leaves them.
        cast_forward_inputs: cast floating-point inputs of a unit's forward to `param_dtype`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True)
class GroupPrecision:
    """Dtypes of one parameter group.

    Attributes:
        main: what the optimizer sees and updates.
        compute: what the module computes with.
        grad: what gradients accumulate in (`.grad` of the sharded parameter).
        wire: what gradients are communicated in.
    """

    main: torch.dtype
    compute: torch.dtype
    grad: torch.dtype
    wire: torch.dtype

    @property
    def itemsize(self) -> int:
        """Bytes of the smallest of the dtypes: offsets aligned for it are aligned for all."""
        return min(dtype.itemsize for dtype in (self.main, self.compute, self.grad, self.wire))

    @property
    def shares_storage(self) -> bool:
        """Whether main parameters can be views of the compute storage."""
        return self.main == self.compute


def cast_floating(value: object, dtype: torch.dtype) -> object:
    """Return `value` cast to `dtype` if it is a floating-point tensor of another dtype, else `value` itself."""
    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != dtype:
        return value.to(dtype)
    return value
