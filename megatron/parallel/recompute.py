"""Activations that are thrown away in forward and computed again in backward, without running their users again.

torch's checkpoint runs a whole function again. Where the function is cheap and its output is what costs memory, since
the linear layer after it keeps it as an operand, it is enough to empty the output's storage when its users have read it
and to fill it again before their backward (Megatron's output-discarding recompute).

Note "Who may use it". All users of the output must lie before one tensor, whose gradient comes before any of their
backwards: `discard` is called with that tensor. Storages are emptied and filled below autograd, so what users saved of
the output, views of it too, has its values again when they look at it. The function must draw no random numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class DiscardedOutput:
    """One call of a function whose outputs do not stay.

        kept = DiscardedOutput()
        activated = kept.call(activation, x)
        out = linear(activated)
        kept.discard(out)

    Without gradients it is a plain call.
    """

    def __init__(self) -> None:
        self._function: Callable[..., Any] | None = None
        self._inputs: Any = None  # the autograd context, which holds them
        self._outputs: tuple[Tensor, ...] = ()
        self._again: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None = None

    def call(self, function: Callable[..., Any], *inputs: Tensor) -> Any:
        """function(*inputs): a tensor or a tuple of tensors."""
        if not torch.is_grad_enabled():
            return function(*inputs)
        self._function = function
        outputs = _Call.apply(self, *inputs)
        self._outputs = tuple(output.detach() for output in outputs)
        return outputs if len(outputs) > 1 else outputs[0]

    def discard(self, users_result: Tensor) -> None:
        """Empty the outputs until the gradient of `users_result` is there (note "Who may use it")."""
        if self._function is None or not users_result.requires_grad:
            return
        users_result.register_hook(self._fill)
        for output in self._outputs:
            output.untyped_storage().resize_(0)

    def _fill(self, _gradient: Tensor) -> None:
        if self._again is not None:
            return
        with torch.profiler.record_function("parallel.recompute"), torch.no_grad():
            for output, again in zip(self._outputs, self.recomputed()[1], strict=True):
                storage, source = output.untyped_storage(), again.detach().untyped_storage()
                if storage.nbytes() != source.nbytes():
                    storage.resize_(source.nbytes())
                    storage.copy_(source)

    def recomputed(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """(inputs as leaves, outputs with a graph of their own)."""
        if self._again is None:
            assert self._function is not None
            needed = self._inputs.needs_input_grad[1:]
            leaves = tuple(
                tensor.detach().requires_grad_(needs)
                for tensor, needs in zip(self._inputs.saved_tensors, needed, strict=True)
            )
            with torch.enable_grad():
                outputs = self._function(*leaves)
            self._again = leaves, (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
        return self._again

    def finish(self) -> None:
        """Let go of everything."""
        self._function, self._inputs, self._outputs, self._again = None, None, (), None


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, owner: DiscardedOutput, *inputs: Tensor) -> tuple[Tensor, ...]:
        assert owner._function is not None
        ctx.owner, owner._inputs = owner, ctx
        ctx.save_for_backward(*inputs)
        outputs = owner._function(*inputs)
        return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        leaves, outputs = ctx.owner.recomputed()
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if output.requires_grad and gradient is not None
        ]
        if pairs:  # parameters of the function get their gradients on the way, as in a reentrant checkpoint
            torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        ctx.owner.finish()
        ctx.owner = None
        return None, *(leaf.grad for leaf in leaves)
