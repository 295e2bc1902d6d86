"""A step's side of the losses that layers have of their own (megatron/models/auxiliary.py).

A pipeline rank has several stages, each with a record of its own; here they are one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.models.auxiliary import AuxiliaryLosses


class StepAuxiliary:
    """The auxiliary losses of all stages of this rank; empty for a model without any."""

    def __init__(self, model: Any) -> None:
        modules = model.modules() if isinstance(model, torch.nn.Module) else ()
        found = [getattr(module, "auxiliary", None) for module in modules]
        self._members = [item for item in found if isinstance(item, AuxiliaryLosses)]
        self.present = any(item.layers for item in self._members)
        names = [name for item in self._members for layer in item.layers for name in layer.losses]
        self.wants_mask = "mtp_loss" in names

    def set_scale(self, scale: float | Tensor) -> None:
        """What the mean loss of the microbatch whose backward comes next is multiplied by."""
        for item in self._members:
            item.scale = scale

    def vector(self, device: torch.device) -> Tensor:
        """What this rank recorded, to be summed over the world: fp64."""
        if not self.present:
            return torch.zeros(0, dtype=torch.float64, device=device)
        return torch.stack([item.vector(device) for item in self._members]).sum(0)

    def forget(self) -> None:
        """Drop what the step recorded: it will be run again."""
        for item in self._members:
            item.forget()

    def finish(self, total: Tensor, num_microbatches: int, *, updated: bool) -> Mapping[str, float]:
        """End the step: biases move where it was an update. Returns numbers for the log; those of one layer have a "/".

        total: `vector` summed over the world. num_microbatches: of the whole global batch.
        """
        if not self.present:
            return {}
        report = self._members[0].report(total, num_microbatches)
        for item in self._members:
            item.end_step(report if updated else None)
        return {**report.means(), **report.by_layer()}
