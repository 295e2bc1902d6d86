"""Losses beside the main one: their gradients, their numbers in the log, and the loads of experts.

Note "In backward". A layer attaches its losses to an activation that the main loss depends on. The gradient enters
when backward comes by, times `AuxiliaryLosses.scale`, which the training step sets just before: what the mean loss
of the same microbatch is multiplied by. Values and loads are recorded there too: once for each microbatch that is
trained on, however often forward ran (recompute), and never in evaluation.

Note "One vector". What ranks recorded is one fp64 vector whose length follows from the configuration alone, so that
all pipeline stages can sum it together with the numbers of the step. Every value is this rank's part of a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class AuxiliaryLayer:
    """What one layer reports: names of its losses, and how many experts it counts."""

    name: str
    losses: tuple[str, ...]
    num_experts: int = 0


@dataclass(frozen=True)
class AuxiliaryReport:
    """One step, over all ranks.

    Attributes:
        losses: by layer, by name: mean over microbatches and data-parallel ranks, without its weight.
        loads: by layer: how many choices each expert got in the step, [experts] int64 on the CPU.
    """

    losses: dict[str, dict[str, float]]
    loads: dict[str, Tensor]

    def means(self) -> dict[str, float]:
        """Each loss, the mean over its layers; with experts, the largest load over the mean load of all layers."""
        found: dict[str, list[float]] = {}
        for values in self.losses.values():
            for name, value in values.items():
                found.setdefault(name, []).append(value)
        means = {name: sum(values) / len(values) for name, values in found.items()}
        if self.loads:
            means["max_expert_load"] = max(imbalance(counts) for counts in self.loads.values())
        return means

    def by_layer(self) -> dict[str, float]:
        """Everything, one number a name."""
        values = {
            f"{name}/{layer}": value for layer, found in self.losses.items() for name, value in found.items()
        }
        for layer, counts in self.loads.items():
            values[f"max_expert_load/{layer}"] = imbalance(counts)
            total = max(int(counts.sum()), 1)
            values |= {f"expert_load/{layer}/{i}": n / total for i, n in enumerate(counts.tolist())}
        return values


def imbalance(counts: Tensor) -> float:
    """Load of the busiest expert over the mean load; 1 is even."""
    return float(counts.max() * counts.numel() / counts.sum().clamp(min=1))


@dataclass
class AuxiliaryLosses:
    """Of one model on this rank (notes above).

    Attributes:
        layers: of the whole model, in order, the same on all ranks.
        scale: factor of every auxiliary gradient; a number or a scalar tensor.
    """

    layers: Sequence[AuxiliaryLayer]
    scale: float | Tensor = 1.0
    _values: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    _loads: dict[str, Tensor] = field(default_factory=dict)
    _on_step_end: list[Callable[[AuxiliaryReport | None], None]] = field(default_factory=list)
    _on_forget: list[Callable[[], None]] = field(default_factory=list)

    def attach(
        self,
        activation: Tensor,
        layer: str,
        losses: dict[str, tuple[Tensor, float]],
        counts: Tensor | None = None,
        counted: bool = True,
    ) -> Tensor:
        """`activation` with losses attached (note "In backward"); the result must be used in its place.

        losses: name -> (this rank's part, weight). counts: choices of each expert by this rank's tokens, [experts].
        counted: False where another rank reports the same values.
        """
        names = tuple(losses)
        weights = tuple(weight for _, weight in losses.values())
        record = _Record(self, layer, names, weights, counts, counted)
        return _Attach.apply(activation, record, *(value for value, _ in losses.values()))

    def record(self, layer: str, name: str, value: Tensor) -> None:
        """Add this rank's part of one microbatch's value."""
        value = value.detach().double()
        before = self._values.get((layer, name))
        self._values[layer, name] = value if before is None else before + value

    def record_load(self, layer: str, counts: Tensor) -> None:
        """Add one microbatch's choices of this rank."""
        before = self._loads.get(layer)
        self._loads[layer] = counts if before is None else before + counts

    def on_forget(self, call: Callable[[], None]) -> None:
        """Call `call()` where a step begins anew: after its end, and where it is run again."""
        self._on_forget.append(call)

    def on_step_end(self, call: Callable[[AuxiliaryReport | None], None]) -> None:
        """Call `call(report)` at the end of each step; report None: the step's update was skipped."""
        self._on_step_end.append(call)

    def vector(self, device: torch.device | str = "cpu") -> Tensor:
        """What this rank recorded in the step (note "One vector"): [length] fp64."""
        zero = torch.zeros((), dtype=torch.float64, device=device)
        parts = []
        for layer in self.layers:
            parts += [self._values.get((layer.name, name), zero).reshape(1) for name in layer.losses]
            if layer.num_experts:
                counts = self._loads.get(layer.name)
                parts.append(zero.expand(layer.num_experts) if counts is None else counts.double())
        return torch.cat(parts) if parts else zero.new_zeros(0)

    def report(self, total: Tensor, num_microbatches: int) -> AuxiliaryReport:
        """Read the vector summed over all ranks.

        num_microbatches: of the global batch, those of all data-parallel ranks together.
        """
        numbers = total.to("cpu")
        losses: dict[str, dict[str, float]] = {}
        loads: dict[str, Tensor] = {}
        position = 0
        for layer in self.layers:
            for name in layer.losses:
                losses.setdefault(layer.name, {})[name] = float(numbers[position]) / num_microbatches
                position += 1
            if layer.num_experts:
                loads[layer.name] = numbers[position : position + layer.num_experts].round().long()
                position += layer.num_experts
        assert position == numbers.numel(), "the vector does not fit the model's layers"
        return AuxiliaryReport(losses, loads)

    def forget(self) -> None:
        """Drop what was recorded since the last step ended, and tell those who count along."""
        self._values.clear()
        self._loads.clear()
        for call in self._on_forget:
            call()

    def end_step(self, report: AuxiliaryReport | None) -> None:
        """Forget what was recorded and tell those who wait for it (expert biases move); None: update skipped."""
        self.forget()
        for call in self._on_step_end:
            call(report)


@dataclass
class _Record:
    owner: AuxiliaryLosses
    layer: str
    names: tuple[str, ...]
    weights: tuple[float, ...]
    counts: Tensor | None
    counted: bool


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activation: Tensor, record: _Record, *values: Tensor) -> Tensor:
        ctx.record, ctx.values = record, [value.detach() for value in values]
        return activation.view_as(activation)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        record = ctx.record
        owner = record.owner
        grads = []
        for name, weight, value in zip(record.names, record.weights, ctx.values, strict=True):
            if record.counted:
                owner.record(record.layer, name, value)
            grads.append((torch.ones_like(value) * owner.scale * weight).to(value.dtype))
        if record.counts is not None:
            owner.record_load(record.layer, record.counts)
        return grad, None, *grads
