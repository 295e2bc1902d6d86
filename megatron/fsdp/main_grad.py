"""The main_grad contract: which buffer a weight-gradient write goes to, and whether it overwrites.

Layers with fused wgrad (Transformer Engine's and ours) read the contract's attributes on the compute parameter:
`__fsdp_param__`, `get_main_grad`, `overwrite_main_grad`. This module alone writes them. docs/main_grad_contract.md
states the contract for users.

Note [Grant]
A parameter announces one constant for its whole life, so that it does not matter whether a layer reads it in forward
or in backward: overwrite where the buffer is temporary (one microbatch), accumulate where it is persistent (a step).
The first writer in a backward pass gets the real buffer if nothing else was written in that pass; every later one
gets a scratch of its own that is added when the gradient is final, so that an overwrite can never lose a term.

Note [Windows]
A window is what one buffer accumulates: one microbatch for a temporary buffer, one step for a persistent one. A pass
is one call of backward. Writes of a delayed wgrad arrive after the pass; while one is pending, gradients of autograd
are kept aside, since the pending write may overwrite.

`grad_added_to_main_grad` is left undefined: Transformer Engine then returns None for the wgrad instead of an
uninitialised dummy that autograd would add to a tied weight's gradient.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn


class BufferOwner(Protocol):
    """What a `MainGrad` needs of its parameter group."""

    pass_id: int

    def open_window(self) -> None:
        """Make the group's gradient buffer ready to be written."""

    def gradient_view(self, index: int) -> Tensor:
        """Return the open buffer's view of parameter `index`, in its full shape."""


class MainGrad:
    """Gradient of one parameter in the current window.

    Args:
        name: of the parameter, for messages.
        parameter: the compute parameter that layers see; the contract's attributes are set on it.
        owner: the parameter group, which owns the buffers.
        index: of the parameter in the group.
        overwrite: what is announced as `overwrite_main_grad`.
        scratch_dtype: dtype of scratch buffers (the dtype that gradients accumulate in).
    """

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        owner: BufferOwner,
        index: int,
        overwrite: bool,
        scratch_dtype: torch.dtype,
    ) -> None:
        self.name = name
        self.parameter = parameter
        self.owner = owner
        self.index = index
        self.overwrite = overwrite
        self.scratch_dtype = scratch_dtype
        self.written = False  # the real buffer holds data of this window
        self.delaying: list[
            nn.Module
        ] = []  # layers that compute its wgrad in backward_dw(), see `delays_wgrad`
        self._pass_id = -1  # the pass in which the parameter was last written
        self._aside: list[Tensor] = []  # scratches and set-aside gradients, added when final
        self.announce()

    def announce(self) -> None:
        """Set the contract's attributes on the compute parameter."""
        parameter = self.parameter
        parameter.__fsdp_param__ = True  # type: ignore[attr-defined]
        parameter.get_main_grad = self.get_main_grad  # type: ignore[attr-defined]
        parameter.overwrite_main_grad = self.overwrite  # type: ignore[attr-defined]

    def get_main_grad(self) -> Tensor:
        """Return the buffer that one fused wgrad writes to: the parameter's shape, contiguous (Note [Grant])."""
        self.owner.open_window()
        if self._touched() or (self.overwrite and self.written):
            scratch = torch.empty(
                self.parameter.shape, dtype=self.scratch_dtype, device=self.parameter.device
            )
            if not self.overwrite:
                scratch.zero_()
            self._aside.append(scratch)
            self._touch()
            return scratch
        buffer = self.owner.gradient_view(self.index)
        if not self.overwrite and not self.written:
            buffer.zero_()
        self.written = True
        self._touch()
        return buffer

    def collect(self) -> None:
        """Move the gradient that autograd left in `.grad` of the compute parameter into the window."""
        gradient, self.parameter.grad = self.parameter.grad, None
        if gradient is None:
            return
        self.owner.open_window()
        buffer = self.owner.gradient_view(self.index)
        pending = self.pending_writes
        if not self.written and not pending:
            buffer.copy_(gradient)
            self.written = True
        elif pending or buffer.dtype != self.scratch_dtype:
            self._aside.append(gradient)
        else:
            buffer.add_(gradient)
        self._touch()

    @property
    def pending_writes(self) -> int:
        """Number of delayed wgrads that have not run, of all weights of the layers that use this one.

        The layers' own queues are asked: how often a parameter was used, only they know (a layer called twice fires
        the parameter's hook once; a tied weight is used by layers that do not delay as well).
        """
        return sum(waiting_wgrads(layer) for layer in self.delaying)

    def close(self) -> None:
        """Make the buffer hold the sum of all writes of the window: nothing unwritten, nothing left aside."""
        assert self.pending_writes == 0, f"{self.name}: reduced while a delayed wgrad is pending"
        if self.delaying:
            self.collect()  # what the last backward_dw() assigned, if its hook for another unit came first
        buffer = self.owner.gradient_view(self.index)
        if not self.written:
            buffer.zero_()
            self.written = True
        if self._aside:
            total = buffer if buffer.dtype == self.scratch_dtype else buffer.to(self.scratch_dtype)
            for term in self._aside:
                total.add_(term)
            if total is not buffer:
                buffer.copy_(total)
            self._aside.clear()

    def reset(self) -> None:
        """Begin a new window: whatever the buffer holds no longer counts."""
        self.written = False
        self._pass_id = -1
        self._aside.clear()

    def _touched(self) -> bool:
        return self._pass_id == self.owner.pass_id

    def _touch(self) -> None:
        self._pass_id = self.owner.pass_id


def is_te_ops(module: nn.Module) -> bool:
    """Whether `module` is one of te.ops, which in overwrite mode return the real wgrad as well (TE 2.20)."""
    return any(cls.__module__.startswith("transformer_engine.pytorch.ops") for cls in type(module).__mro__)


def delays_wgrad(module: nn.Module) -> bool:
    """Whether `module` computes its weight gradients in `backward_dw()`, after backward (duck-typed as in TE)."""
    store = getattr(module, "wgrad_store", None)
    return store is not None and bool(store.delay_wgrad_compute())


def waiting_wgrads(module: nn.Module) -> int:
    """How many weight gradients of a layer that delays them wait for `backward_dw()`."""
    store = module.wgrad_store
    queue = getattr(store, "context", None)  # TE's; our layers' store has a length
    return len(store) if queue is None else queue.qsize()  # type: ignore[arg-type]
