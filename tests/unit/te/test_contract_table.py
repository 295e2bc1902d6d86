"""TE layers under our FSDP over 2 ranks: the contract table of docs/main_grad_contract.md, "Proof".

Models that use weights in every way (tests/te/models.py) x strategies x {fused, unfused} x one unit or one
per layer x {one microbatch after the other, all forwards first} x recompute (torch's, TE's, reentrant and
not) x is_first_microbatch x delayed wgrad (after each backward, or all at the end of the step, layers in
either order). Gradients of 3 microbatches that grow tenfold, different on each rank, against unfused layers
in one process; two steps.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.te.cover import Cell, full_product, name_of, pair_cover, shared_cover
from tests.te.engine import device, load, run_te_ranks
from tests.te.models import (
    MODELS,
    NEVER_DELAYED,
    RECOMPUTES,
    call,
    delayed_layers,
    layer_options,
    loss_of,
    microbatch,
    run_delayed,
)

WORLD, MICROBATCHES, STEPS = 2, 3, 2
TOLERANCE = 1e-6
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
AXES: dict[str, tuple[Any, ...]] = {
    "strategy": STRATEGIES,
    "fused": (True, False),
    "units": ("root", "layers"),
    "order": ("one-by-one", "forwards-first"),
    "recompute": RECOMPUTES,
    "tell_first": (False, True),
    "delay": ("none", "each", "end", "end-reversed"),
}


def layer_types() -> tuple[type[nn.Module], ...]:
    """What becomes a unit of its own."""
    te = load()
    return (
        te.Linear,
        te.LayerNormLinear,
        te.LayerNormMLP,
        te.GroupedLinear,
        te.ops.BasicLinear,
        nn.Embedding,
    )


def wrap(model: nn.Module, mesh: Any, cell: Cell) -> Any:
    """The model under FSDP as the cell says."""
    from megatron.fsdp import (
        FSDPConfig,
        FullyShardedDataParallel,
        OuterStrategy,
        ShardingStrategy,
        data_parallel_placement,
    )

    config = FSDPConfig(
        strategy=ShardingStrategy(cell["strategy"]),
        outer_strategy=OuterStrategy(cell.get("outer", "no_shard")),
        defer_communication=cell.get("defer", False),
    )
    units = layer_types() if cell["units"] == "layers" else ()
    return FullyShardedDataParallel(model, config, data_parallel_placement(mesh), units)


def twins(name: str, cell: Cell) -> tuple[nn.Module, nn.Module]:
    """(unfused reference, model to be wrapped), equal weights on all ranks."""
    torch.manual_seed(1)
    reference = MODELS[name](layer_options(False, False))
    model = MODELS[name](layer_options(cell["fused"], cell["delay"] != "none"))
    with torch.no_grad():
        for got, want in zip(model.parameters(), reference.parameters(), strict=True):
            got.copy_(want)
    return reference, model


def reference_gradients(reference: nn.Module, cell: Cell, world_size: int) -> dict[str, Tensor]:
    """Mean over ranks of the sum over microbatches."""
    reference.zero_grad()
    for rank in range(world_size):
        for index in range(MICROBATCHES):
            (loss_of(call(reference, microbatch(index, rank), cell["recompute"])) / world_size).backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in reference.named_parameters()
    }


def run_step(model: Any, cell: Cell, rank: int) -> None:
    """Three microbatches, the last with synchronisation, and the delayed weight gradients."""
    layers = delayed_layers(model)
    if cell["delay"] == "end-reversed":
        layers.reverse()

    def forward(index: int) -> Tensor:
        options = {}
        if cell["tell_first"]:
            options["is_first_microbatch"] = index == 0
        return loss_of(call(model, microbatch(index, rank), cell["recompute"], **options))

    def run(index: int, ahead: list[Tensor]) -> None:
        (ahead[index] if ahead else forward(index)).backward()
        if cell["delay"] == "each" or index == MICROBATCHES - 1:
            for layer in layers:
                run_delayed(layer)

    model.zero_grad_buffer()
    ahead = [forward(index) for index in range(MICROBATCHES)] if cell["order"] == "forwards-first" else []
    with model.no_sync():
        for index in range(MICROBATCHES - 1):
            run(index, ahead)
    run(MICROBATCHES - 1, ahead)
    model.finish_grad_sync()


def run_cell(rank: int, world_size: int, name: str, cell: Cell, mesh: Any) -> float:
    """Largest error, relative to the largest value of each tensor."""
    reference, model = twins(name, cell)
    wrapped = wrap(model, mesh, cell)
    wants = reference_gradients(reference, cell, world_size)
    worst = 0.0
    for _ in range(STEPS):
        run_step(wrapped, cell, rank)
        gradients = {}
        for key, parameter in wrapped.named_parameters():
            gradients[key] = None if parameter.grad is None else parameter.grad.full_tensor()
        for key, want in wants.items():
            got = gradients[key] if gradients[key] is not None else torch.zeros_like(want)
            error = (got - want).abs().max().item() / max(want.abs().max().item(), 1e-9)
            worst = max(worst, error if error == error else float("inf"))
        for parameter in wrapped.parameters():
            assert not hasattr(parameter, "grad_added_to_main_grad")
    return worst


def make_mesh(world_size: int, outer: int) -> Any:
    """1-D, or (outer, inner)."""
    from torch.distributed.device_mesh import init_device_mesh

    if outer == 1:
        return init_device_mesh(device(), (world_size,), mesh_dim_names=("fsdp",))
    return init_device_mesh(device(), (outer, world_size // outer), mesh_dim_names=("dp_outer", "fsdp"))


def run_cells(
    rank: int, world_size: int, name: str, cells: list[Cell], outer: int = 1
) -> dict[str, float | str]:
    """The cells that are wrong."""
    mesh = make_mesh(world_size, outer)
    wrong: dict[str, float | str] = {}
    for cell in cells:
        try:
            error = run_cell(rank, world_size, name, cell, mesh)
        except Exception as failure:
            failure.add_note(name_of(cell))
            raise
        if not error < TOLERANCE:
            wrong[name_of(cell)] = error
    return wrong


def possible(name: str, cell: Cell) -> bool:
    """What the contract table leaves out.

    - a weight used outside of its unit, where it is not gathered;
    - a unit that only some ranks run: under ZeRO-3 its gather, and with a wgrad delayed beyond the pass its
      reduction, is a collective that the others do not take part in;
    - unfused delayed experts, which TE gets wrong (test_contract_facts.py).
    """
    layers, delayed = cell["units"] == "layers", cell["delay"] != "none"
    if name == "autograd-first" and layers:
        return False
    if name == "sometimes" and layers and cell["strategy"] == "optim_grads_params":
        return False
    if name == "sometimes" and layers and cell["delay"].startswith("end"):
        return False
    if delayed and name.startswith("expert") and not cell["fused"]:
        return False
    return not delayed or (cell["recompute"] == "none" and name not in NEVER_DELAYED)


@functools.cache
def default_cells() -> dict[str, list[Cell]]:
    """Of the default run: every value with every model, every pair of values with some model."""
    return shared_cover(AXES, list(MODELS), possible)


def assert_right(name: str, cells: list[Cell], world_size: int = WORLD, outer: int = 1) -> None:
    timeout = 30 + 2 * len(cells)
    for wrong in run_te_ranks(run_cells, world_size, name, cells, outer, timeout=timeout):
        assert not wrong, f"{len(wrong)} of {len(cells)} wrong: {wrong}"


@pytest.mark.parametrize("name", MODELS)
def test_gradients_under_fsdp(name: str) -> None:
    """Fault replays: P10, F01 (recompute), F05 (frozen and fused), F06 (unused), F11 (tied)."""
    assert_right(name, default_cells()[name])


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_gradients_under_fsdp_everywhere(name: str) -> None:
    """The whole product."""
    assert_right(name, full_product(AXES, lambda cell: possible(name, cell)))


HYBRID_AXES: dict[str, tuple[Any, ...]] = {
    **AXES,
    "strategy": STRATEGIES[1:],
    "outer": ("no_shard", "optim"),
    "recompute": ("none", "te"),
}
HYBRID_MODELS = ("tied-embedding", "mlp-twice", "experts-twice", "operation-tied")


def possible_hybrid(name: str, cell: Cell) -> bool:
    """The outer axis shards optimizer states under ZeRO-3 only."""
    return possible(name, cell) and (cell["outer"] == "no_shard" or cell["strategy"] == STRATEGIES[-1])


@functools.cache
def hybrid_cells() -> dict[str, list[Cell]]:
    """As `default_cells`."""
    return shared_cover(HYBRID_AXES, HYBRID_MODELS, possible_hybrid)


@pytest.mark.parametrize("name", HYBRID_MODELS)
def test_gradients_under_hybrid_sharding(name: str) -> None:
    """HSDP and HFSDP: 2 x 2 ranks."""
    assert_right(name, hybrid_cells()[name], 2 * WORLD, outer=2)


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_gradients_under_hybrid_sharding_everywhere(name: str) -> None:
    """Every pair of values with every model."""
    assert_right(name, pair_cover(HYBRID_AXES, lambda cell: possible_hybrid(name, cell)), 2 * WORLD, outer=2)
