"""Gradients of one parameter group: the window that layers write to, and the delivery of what was reduced.

Note [Gradient buffers]
- `full_grad`: flat, full size; a temporary of one microbatch in the wire dtype, or persistent in the grad dtype.
- `deferred`: flat, full size, grad dtype; whole gradients of microbatches whose communication was deferred.
- `partial`: this rank's part, summed over the inner axis and scaled, still partial over the outer one.
- `grad`: this rank's part, what the `.grad` of the sharded parameters are views of. They alone keep it alive:
  `zero_grad()` frees it at once.

Note [Scale]
A fresh gradient, summed over the inner axis, is divided by the gradient divisor once, in `deliver_inner`, before it
meets older ones. A persistent buffer that was reduced and is written again keeps the reduced part aside until the fresh
part has been reduced and scaled too.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron.fsdp.sharded_parameter import make_dtensor

if TYPE_CHECKING:
    from megatron.fsdp.managed import ManagedParameter
    from megatron.fsdp.param_group import ParamGroup


class GroupGradients:
    """Gradient buffers of `group` and what may be done with them (Note [Gradient buffers])."""

    def __init__(self, group: ParamGroup) -> None:
        self.group = group
        self.divisor = group.spec.gradient_divisor
        self.pass_id = 0
        self.full_grad: Tensor | None = None
        self.deferred: Tensor | None = None
        self.partial: Tensor | None = None
        self._grad: weakref.ref[Tensor] | None = None
        self.window_open = False
        self._stash: Tensor | None = None
        self._exposed = False  # `full_grad` (persistent) holds reduced gradients

    @property
    def grad(self) -> Tensor | None:
        """See Note [Gradient buffers]; None when no `.grad` refers to it."""
        return None if self._grad is None else self._grad()

    # --- the window -------------------------------------------------------------------------------------------

    def gradient_view(self, index: int) -> Tensor:
        """Parameter `index`'s view of the open gradient buffer."""
        assert self.full_grad is not None, f"{self.group.name}: no gradient buffer is open"
        item = self.group.layout.items[index]
        return self.full_grad[item.offset : item.offset + item.numel].view(item.shape)

    def open_window(self) -> None:
        """Make the gradient buffer ready to be written."""
        if self.window_open:
            return
        if self.group.placements.gradients_sharded:
            self.full_grad = self._new_full(self.group.precision.wire)
            self._reset_window()
        elif self.full_grad is None:
            self.full_grad = self._new_full(self.group.precision.grad)
            self._reset_window()
        elif self._exposed:
            self._reopen_persistent()
        self.window_open = True

    def _new_full(self, dtype: torch.dtype) -> Tensor:
        buffer = torch.empty(self.group.layout.numel, dtype=dtype, device=self.group.spec.device)
        for start, stop in self.group.layout.padding_ranges():
            buffer[start:stop] = 0
        return buffer

    def _reset_window(self) -> None:
        for managed in self.group.parameters:
            managed.main_grad.reset()

    def _reopen_persistent(self) -> None:
        """A persistent buffer holds reduced gradients and is to take fresh ones: keep what still counts aside."""
        assert self.full_grad is not None
        if any(managed.sharded.grad is not None for managed in self.group.parameters):
            self._stash = self._settle().clone()
            for managed in self.group.parameters:
                managed.sharded.grad = None
        self._exposed = False
        self._reset_window()

    def pending_writes(self) -> int:
        """Number of delayed wgrads that have not run."""
        return sum(managed.main_grad.pending_writes for managed in self.group.parameters)

    def close_window(self) -> None:
        """Make the open buffer hold exactly the sum of the window's writes."""
        self.open_window()
        for managed in self.group.parameters:
            managed.main_grad.close()

    def defer(self) -> None:
        """Keep a temporary window's gradient unreduced and add it up (communication deferred)."""
        assert self.group.placements.gradients_sharded and self.full_grad is not None
        if self.deferred is not None:
            self.deferred.add_(self.full_grad)
        else:
            self.deferred = self.full_grad.to(self.group.precision.grad)
        self.full_grad = None
        self.window_open = False

    def merge_deferred(self) -> None:
        """Add what was deferred to the closed window.

        On the stream that owns both: the reduce stream would still read one when its memory is reused.
        """
        if self.deferred is not None:
            assert self.full_grad is not None
            self.full_grad = self.deferred.add_(self.full_grad).to(self.group.precision.wire)
            self.deferred = None

    def take_wire(self) -> Tensor:
        """End the window; return the full-size buffer that goes on the wire."""
        buffer = self.full_grad
        assert buffer is not None
        self.window_open = False
        if self.group.placements.gradients_sharded:
            self.full_grad = None
        return buffer.to(self.group.precision.wire)

    # --- delivery ---------------------------------------------------------------------------------------------

    def deliver_inner(self, total: Tensor) -> None:
        """Take the sum over the inner axis of a fresh gradient and scale it (once, before it meets older ones)."""
        scale = 1.0 / self.divisor
        if not self.group.placements.gradients_sharded:
            assert self.full_grad is not None
            region = self.group.main_slot(self.full_grad)
            if total.data_ptr() != region.data_ptr():
                region.copy_(total)
            self.partial = region.mul_(scale) if scale != 1.0 else region
        elif self.partial is not None:
            self.partial.add_(total, alpha=scale)
        elif self.group.comms.outer_gather.size == 1 and self.has_gradients():
            self._settle().add_(total, alpha=scale)
        else:
            self.partial = torch.empty(total.numel(), dtype=self.group.precision.grad, device=total.device)
            torch.mul(total, scale, out=self.partial)

    def expose(self, total: Tensor | None) -> None:
        """Make `total` (this rank's part, summed over all axes) part of the parameters' `.grad`; run their hooks.

        What users gave to `register_post_accumulate_grad_hook` may step an optimizer and clear the `.grad`.
        """
        self.partial = None
        if total is not None:  # else added in place by deliver_inner
            self._expose_fresh(total)
        for managed in self.group.parameters:
            if managed.sharded.grad is not None:
                _run_gradient_hooks(managed.sharded)

    def _expose_fresh(self, total: Tensor) -> None:
        if self._stash is not None:
            total.add_(self._stash)
            self._stash = None
        elif self.group.placements.gradients_sharded and self.has_gradients():
            total.add_(self._settle())
        # A part of a larger buffer (outer shards) would keep the whole of it alive.
        grad = total.clone() if self.group.placements.outer_sharded else total
        self._grad = weakref.ref(grad)
        self._exposed = not self.group.placements.gradients_sharded
        for managed in self.group.parameters:
            if managed.requires_grad:
                self._attach_grad(managed, grad)

    def _attach_grad(self, managed: ManagedParameter, grad: Tensor) -> None:
        view = self.group.main_rows(grad, managed)
        gradient = self._as_sharded(managed, view)
        if gradient.dtype != managed.sharded.dtype:
            managed.sharded.grad_dtype = gradient.dtype  # type: ignore[attr-defined]
        gradient._fsdp_flat = grad  # type: ignore[attr-defined]
        managed.sharded.grad = gradient

    def _as_sharded(self, managed: ManagedParameter, rows: Tensor) -> DTensor:
        return make_dtensor(rows, managed.info, self.group.spec.mesh, self.group.dtensor_placements(managed))

    def has_gradients(self) -> bool:
        """Whether any sharded parameter has a `.grad`."""
        return any(managed.sharded.grad is not None for managed in self.group.parameters)

    def _settle(self) -> Tensor:
        """Return `grad` as the `.grad` are now, and make them views of it again, so that more can be added.

        Users may have set some to None (their part begins at zero) or to other tensors (their part is a copy).
        """
        known = self.grad
        grad = (
            known if known is not None else torch.zeros_like(self.group.main, dtype=self.group.precision.grad)
        )
        self._grad = weakref.ref(grad)
        for managed in self.group.parameters:
            current = managed.sharded.grad
            if getattr(current, "_fsdp_flat", None) is grad:
                continue
            rows = self.group.main_rows(grad, managed)
            if current is None:
                rows.zero_()
            elif isinstance(current, DTensor):  # cut as the parameter, or as autograd left it
                self._as_sharded(managed, rows).copy_(current)
            else:
                rows.copy_(current)
            if managed.requires_grad:
                self._attach_grad(managed, grad)
        return grad

    def scale(self, factor: float | Tensor) -> None:
        """Multiply every `.grad`."""
        grad = self.grad
        if grad is not None:
            grad.mul_(factor)
        for managed in self.group.parameters:
            current = managed.sharded.grad
            if current is not None and getattr(current, "_fsdp_flat", None) is not grad:
                current.mul_(factor)

    def discard(self) -> None:
        """Forget all gradients, reduced or not (`zero_grad_buffer`, or after a step that failed)."""
        for managed in self.group.parameters:
            managed.sharded.grad = None
            managed.compute.grad = None
        self._reset_window()
        self.window_open = False
        self._exposed = False
        self._grad = self.partial = self.deferred = self._stash = None
        if self.group.placements.gradients_sharded:
            self.full_grad = None


def _run_gradient_hooks(parameter: nn.Parameter) -> None:
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
    for hook in list(hooks.values()) if hooks else ():
        hook(parameter)
