"""Microbatches whose expert traffic is hidden behind each other's compute (--overlap-moe-expert-parallel-comm).

The forward of each microbatch takes turns with the backward of the one before, at every exchange of tokens between
experts (megatron/parallel/interleave.py). Two microbatches' activations are held at once.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from megatron.models.moe.layer import MoELayer
from megatron.parallel.expert import AllToAllDispatcher
from megatron.parallel.interleave import Interleaver


def interleave_experts(model: Any) -> Interleaver:
    """Make the exchanges of all layers with experts of `model` switch; returns what runs the pairs."""
    interleaver = Interleaver()
    assert isinstance(model, nn.Module)
    for module in model.modules():
        if isinstance(module, MoELayer):
            assert isinstance(module.dispatcher, AllToAllDispatcher), "only this dispatcher can switch"
            module.dispatcher.switch = interleaver.switch
    return interleaver
