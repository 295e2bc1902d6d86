"""The contract under every strategy: per-microbatch gradients 1, 10, 100 give 111, whatever writes them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.fsdp import (
    FSDPConfig,
    FullyShardedDataParallel,
    ShardingStrategy,
    data_parallel_placement,
    gradients,
)
from megatron.fsdp.gradients import GroupGradients
from tests.pool import run_ranks
from tests.te.cover import full_product, pair_cover
from tests.unit.fsdp.models import FusedLinear
from tests.unit.fsdp.test_wrapper import make_mesh

STRATEGIES = [strategy.value for strategy in ShardingStrategy]


class Layer(nn.Module):
    """weight is all that trains: with input 1 and d(out) = g, every element of its gradient is g per use."""

    def __init__(self, linear: type[nn.Linear]) -> None:
        super().__init__()
        self.linear = linear(3, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Model(nn.Module):
    """One or two units over one weight, used `uses` times, fused, plain or mixed."""

    def __init__(self, kind: str, uses: str, recompute: bool) -> None:
        super().__init__()
        fused = FusedLinear if kind != "plain" else nn.Linear
        other = nn.Linear if kind == "mixed" else fused
        self.first, self.second = Layer(fused), Layer(other)
        if uses in ("tied", "tied twice"):
            self.second.linear.weight = self.first.linear.weight
        self.uses, self.recompute = uses, recompute

    def call(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.call(self.first, x)
        if self.uses in ("twice", "tied twice"):
            y = y + self.call(self.first, x)
        if self.uses != "unused":
            y = y + self.call(self.second, x)
        return y


def poison(monkey: pytest.MonkeyPatch) -> None:
    """Fill temporary gradient buffers, where overwrite is granted, with NaN."""
    plain = GroupGradients._new_full

    def filled(self: GroupGradients, dtype: torch.dtype) -> torch.Tensor:
        buffer = plain(self, dtype)
        if self.group.placements.gradients_sharded:
            buffer.fill_(float("nan"))
        return buffer

    monkey.setattr(gradients.GroupGradients, "_new_full", filled)


def run_table(rank, world_size, outer, cells):
    results = []
    with pytest.MonkeyPatch.context() as monkey:
        poison(monkey)
        for strategy, kind, uses, recompute, defer, microbatches in cells:
            model = Model(kind, uses, recompute)
            config = FSDPConfig(strategy=ShardingStrategy(strategy), defer_communication=defer)
            placement = data_parallel_placement(make_mesh(world_size, outer))
            wrapped = FullyShardedDataParallel(model, config, placement, (Layer,))
            per_step = []
            for _ in range(2):
                wrapped.zero_grad_buffer()
                for microbatch in range(microbatches):
                    x = torch.ones(1, 3, requires_grad=True)
                    gradient = torch.full((1, 5), 10.0**microbatch)
                    if microbatch < microbatches - 1:
                        with wrapped.no_sync():
                            wrapped(x).backward(gradient)
                    else:
                        wrapped(x).backward(gradient)
                wrapped.finish_grad_sync()
                per_step.append(
                    {name: p.grad.full_tensor().unique().tolist() for name, p in wrapped.named_parameters()}
                )
            results.append(per_step)
    return results


def expected(uses: str, microbatches: int) -> dict[str, list[float]]:
    total = float(sum(10**m for m in range(microbatches)))
    first = {"once": 1, "twice": 2, "tied": 2, "tied twice": 3, "unused": 1}[uses]
    values = {"first.linear.weight": [first * total]}
    if not uses.startswith("tied"):
        values["second.linear.weight"] = [0.0 if uses == "unused" else total]
    return values


AXES = {
    "strategy": STRATEGIES,
    "kind": ("fused", "plain", "mixed"),
    "uses": ("once", "twice", "tied", "tied twice", "unused"),
    "recompute": (False, True),
    "defer": (False, True),
    "microbatches": (1, 3),
}


@pytest.mark.parametrize("world_size, outer", [(1, 1), (2, 1), (4, 2)])
@pytest.mark.parametrize("part", ["pairs", pytest.param("all", marks=pytest.mark.full)])
def test_contract_table(world_size, outer, part):
    """Strategies x kinds x uses x recompute x deferral x 1 and 3 microbatches (G01, G02, G03, G06, G10, G12, G19)."""
    choose = pair_cover if part == "pairs" else full_product
    cells = [tuple(cell.values()) for cell in choose(AXES, lambda _cell: True)]
    for results in run_ranks(run_table, world_size, outer, cells, timeout=200):
        for cell, per_step in zip(cells, results, strict=True):
            for gradient in per_step:
                assert gradient == expected(cell[2], cell[5]), f"{cell}: {gradient}"


def wire(rank, world_size):
    """256 and 1 of two microbatches in bf16 on the wire, under every strategy."""
    return [wire_of(world_size, strategy) for strategy in STRATEGIES]


def wire_of(world_size, strategy):
    config = FSDPConfig(strategy=ShardingStrategy(strategy), grad_comm_dtype=torch.bfloat16)
    model = FullyShardedDataParallel(
        Layer(nn.Linear), config, data_parallel_placement(make_mesh(world_size, 1)), ()
    )
    for value in (256.0, 1.0):
        model(torch.ones(1, 3)).backward(torch.full((1, 5), value))
        model.finish_grad_sync()
    return [p.grad.full_tensor().unique().tolist() for p in model.parameters()]


def test_bf16_on_the_wire_accumulates_in_fp32():
    """256 + 1 = 257: what is communicated in bf16 is accumulated in fp32, also when every backward synchronises."""
    for results in run_ranks(wire, 2):
        assert results == [[[257.0]]] * len(STRATEGIES)
