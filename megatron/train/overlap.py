"""What is computed while tokens travel between experts: another microbatch, delayed weight gradients.

Note "Another microbatch" (--overlap-moe-expert-parallel-comm). The forward of each microbatch takes turns with the
backward of the one before, at every exchange of tokens between experts (megatron/parallel/interleave.py). Two
microbatches' activations are held at once.

Note "Delayed weight gradients" (--delay-wgrad-compute without a pipeline). What a backward has left so far is
computed at each of its exchanges, before it waits for the tokens, and the rest at its end. A pipeline's schedule
has them instead (megatron/train/pipeline_runner.py).
"""

from __future__ import annotations

from typing import Any

from torch import nn

from megatron.fsdp.main_grad import delays_wgrad, waiting_wgrads
from megatron.models.moe.layer import MoELayer
from megatron.parallel.expert import AllToAllDispatcher
from megatron.parallel.interleave import Interleaver


class DelayedWeightGradients:
    """The layers of `model` that delay their weight gradients, in the order in which backward comes by."""

    def __init__(self, model: Any) -> None:
        modules = list(model.modules()) if isinstance(model, nn.Module) else []
        self.modules: list[Any] = [module for module in reversed(modules) if delays_wgrad(module)]

    def compute(self) -> None:
        """Compute all that wait."""
        for module in self.modules:
            while waiting_wgrads(module):
                module.backward_dw()


def use_waits(model: Any, delayed: DelayedWeightGradients, interleaver: Interleaver | None) -> None:
    """Let the waits for tokens in all layers with experts of `model` be used (notes above)."""
    if interleaver is None and not delayed.modules:
        return

    def meanwhile() -> None:
        delayed.compute()
        if interleaver is not None:
            interleaver.switch()

    for module in model.modules():
        if isinstance(module, MoELayer) and isinstance(module.dispatcher, AllToAllDispatcher):
            module.dispatcher.switch = meanwhile
