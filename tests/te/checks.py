"""Comparisons and main_grad buffers that several TE tests share."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

NAN = float("nan")


def assert_close(what: str, got: Tensor, want: Tensor, tolerance: float = 1e-5) -> None:
    """Largest difference within `tolerance` times the largest wanted value. NaN never passes."""
    assert tuple(got.shape) == tuple(want.shape), f"{what}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    if want.numel() == 0:
        return
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    error, scale = (got - want).abs().max().item(), max(want.abs().max().item(), 1e-6)
    assert error <= tolerance * scale, f"{what}: off by {error:.3g} at a scale of {scale:.3g}"


def give_persistent_buffer(weight: Tensor, fill: float = 0.5, dtype: torch.dtype = torch.float32) -> None:
    """What DDP promises a layer: one main_grad for the whole step, accumulated into."""
    weight.main_grad = torch.full(tuple(weight.shape), fill, dtype=dtype, device=weight.device)
    weight.grad_added_to_main_grad = False


@dataclass
class TemporaryBuffer:
    """What FSDP promises a layer: a buffer of garbage, handed out when asked, to be overwritten."""

    buffer: Tensor
    calls: int = field(default=0)

    def get(self) -> Tensor:
        """The layer's `get_main_grad`."""
        self.calls += 1
        return self.buffer


def give_temporary_buffer(weight: Tensor, dtype: torch.dtype = torch.float32) -> TemporaryBuffer:
    """Attach a TemporaryBuffer full of NaN to `weight` and return it."""
    temporary = TemporaryBuffer(torch.full(tuple(weight.shape), NAN, dtype=dtype, device=weight.device))
    weight.__dict__["__fsdp_param__"] = True
    weight.get_main_grad = temporary.get
    weight.overwrite_main_grad, weight.grad_added_to_main_grad = True, False
    return temporary
