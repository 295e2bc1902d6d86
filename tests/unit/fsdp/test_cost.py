"""What FSDP costs, by counting: bytes and calls on the wire, persistent bytes, order of launches."""

from __future__ import annotations

import functools
import gc
import itertools
import weakref

import pytest
import torch
from torch import nn

from megatron.fsdp import ShardingStrategy
from megatron.fsdp.root import unit_of
from tests.pool import run_ranks
from tests.unit.fsdp.models import Block, loss_of, tokens_for
from tests.unit.fsdp.test_wrapper import STRATEGIES, build, wrap


def train_steps(model, optim, rank, steps, microbatches=1):
    for step in range(steps):
        model.zero_grad_buffer()
        for microbatch in range(microbatches - 1):
            with model.no_sync():
                loss_of(model, tokens_for(step, microbatch, rank)).backward()
        loss_of(model, tokens_for(step, microbatches - 1, rank)).backward()
        model.finish_grad_sync()
        optim.step()


def traffic(rank, world_size, microbatches):
    return [traffic_of(rank, world_size, strategy, microbatches) for strategy in STRATEGIES]


def traffic_of(rank, world_size, strategy, microbatches):
    """Bytes and calls of one steady step, and the full bytes of (Z3 units in forward, in backward, all)."""
    model = wrap(build("fused", False), world_size, strategy=ShardingStrategy(strategy))
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    train_steps(model, optim, rank, 2)
    comms = next(group.comms for unit in model.engine.units for group in unit.groups)
    for comm in (comms.gather, comms.reduce):
        comm.traffic.clear()
    train_steps(model, optim, rank, 1, microbatches)
    sizes = {}
    for unit in model.engine.units:
        sizes[unit.name] = sum(group.layout.numel for group in unit.groups) * 8
    counted = {"all_gather": (0, 0), "reduce_scatter": (0, 0), "all_reduce": (0, 0)}
    for comm in (comms.gather, comms.reduce):
        for name, count in comm.traffic.items():
            calls, size = counted[name]
            counted[name] = (calls + count.calls, size + count.bytes)
    groups = {unit.name: len(unit.groups) for unit in model.engine.units}
    return counted, sizes, groups


@pytest.mark.parametrize("world_size, microbatches", [(2, 1), (3, 2)])
def test_bytes_and_calls_are_minimal(world_size, microbatches):
    """What the strategy must move, once (G24): no unit is gathered or reduced a second time for the same use."""
    share = (world_size - 1) / world_size
    results = [
        (strategy, *result)
        for by_strategy in run_ranks(traffic, world_size, microbatches)
        for strategy, result in zip(STRATEGIES, by_strategy, strict=True)
    ]
    for strategy, counted, sizes, groups in results:
        blocks = {name for name in sizes if name.startswith("blocks.")}
        last_block = max(blocks)
        all_bytes, all_groups = sum(sizes.values()), sum(groups.values())
        if strategy == "optim_grads_params":
            # forward: all; backward: blocks but the last, which stays; the embedding's does not read its weight
            again = blocks - {last_block}
            gathered = all_bytes + sum(sizes[name] for name in again)
            gather_calls = (all_groups + sum(groups[name] for name in again)) * microbatches
            gathered *= microbatches
        elif strategy == "no_shard":
            assert counted["all_reduce"] == (all_groups, 2 * all_bytes * share)
            assert counted["all_gather"] == counted["reduce_scatter"] == (0, 0)
            continue
        else:
            gathered, gather_calls = all_bytes, all_groups
        reductions = microbatches if strategy in ("optim_grads", "optim_grads_params") else 1
        assert counted["all_gather"] == (gather_calls, gathered * share)
        assert counted["reduce_scatter"] == (all_groups * reductions, all_bytes * reductions * share)
        assert counted["all_reduce"] == (0, 0)


def storages(model: nn.Module, optim: torch.optim.Optimizer) -> int:
    """Bytes of the distinct storages that parameters, gradients, buffers and optimizer state keep alive."""
    tensors = []
    for group in model.groups:
        gradients = group.gradients
        tensors += [
            group.compute,
            group.main,
            group.inner,
            gradients.full_grad,
            gradients.grad,
            gradients.partial,
        ]
        tensors += [gradients.deferred]
    for state in optim.state.values():
        tensors += [value._local_tensor for key, value in state.items() if key != "step"]
    seen = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(seen.values())


def persistent(rank, world_size, cells):
    return [persistent_of(world_size, *cell) for cell in cells]


def persistent_of(world_size, strategy, compute):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(16, 32) for _ in range(3))).to(getattr(torch, compute))
    options = {"main_params_dtype": torch.float32, "main_grads_dtype": torch.float32}
    model = wrap(model, world_size, strategy=ShardingStrategy(strategy), **options)
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.randn(2, 16, dtype=getattr(torch, compute))
    for _ in range(2):
        model(x).float().square().mean().backward()
        model.finish_grad_sync()
        optim.step()
    padded = sum(group.layout.numel for group in model.groups)
    # optimizer state has no padding
    local = sum(parameter._local_tensor.numel() for parameter in model.parameters())
    return storages(model, optim), padded, local


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_persistent_bytes_equal_the_formula(world_size):
    """Bytes per parameter with AdamW, to the byte, the layout's padding counted in (fsdp.md's table)."""
    n = world_size
    table = {  # without AdamW's 8 bytes per element that the optimizer holds
        ("no_shard", "float32"): 8.0,
        ("no_shard", "bfloat16"): 10.0,
        ("optim", "float32"): 8.0,
        ("optim", "bfloat16"): 6 + 4 / n,
        ("optim_grads", "float32"): 4 + 4 / n,
        ("optim_grads", "bfloat16"): 2 + 8 / n,
        ("optim_grads_params", "float32"): 8 / n,
        ("optim_grads_params", "bfloat16"): 8 / n,
    }
    for results in run_ranks(persistent, world_size, list(table)):
        for cell, (found, padded, local) in zip(table, results, strict=True):
            assert found == table[cell] * padded + 8 * local, cell


def launches(rank, world_size):
    """Events of the second step's forward and backward under ZeRO-3."""
    model = wrap(build("fused", False), world_size)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    train_steps(model, optim, rank, 1)
    model.engine.streams.log.enabled = True
    train_steps(model, optim, rank, 1)
    return model.engine.streams.log.events


def test_gathers_run_ahead_and_only_the_ends_are_exposed():
    """gather(i+1) is launched before release(i); in backward gather(i-1) before release(i) and reduce(i)."""
    for events in run_ranks(launches, 2):
        blocks = [f"blocks.{i}" for i in range(3)]
        first = {(event, name): i for i, (event, name) in reversed(list(enumerate(events)))}
        assert events[0][0] == "gather"
        for before, after in itertools.pairwise(blocks):
            assert first["gather", after] < first["release", before], "forward gathers one unit ahead"
        backward = events[first["wait_gather", blocks[-1]] :]
        last_gather = {
            name: max(i for i, e in enumerate(events) if e == ("gather", name)) for name in blocks[:-1]
        }
        reduced = {name: i for i, (event, name) in enumerate(events) if event == "reduce"}
        for before, after in itertools.pairwise(blocks):
            assert last_gather[before] < reduced[after], "backward gathers one unit ahead of the reduction"
        order = [name for event, name in backward if event == "reduce"]
        assert [name for name in order if name in blocks] == blocks[::-1]


def meta_bits(rank, world_size, strategy, seed):
    """Parameters drawn shard by shard on meta, and how much was materialised at a time."""
    with torch.device("meta"):
        model = nn.Sequential(*(Block(6, 10) for _ in range(2)))

    def initialize(name, parameter, rows, out):
        generator = torch.Generator().manual_seed(seed + len(name) + ord(name[0]))
        full = torch.randn(parameter.shape, generator=generator)
        out.copy_(full[rows])

    from megatron.fsdp import FSDPConfig, FullyShardedDataParallel, data_parallel_placement
    from tests.unit.fsdp.test_wrapper import make_mesh

    config = FSDPConfig(strategy=ShardingStrategy(strategy))
    placement = data_parallel_placement(make_mesh(world_size, 1))
    wrapped = FullyShardedDataParallel(model, config, placement, (Block,), initialize)
    x = torch.ones(2, 6)
    loss = wrapped(x).square().mean()
    return {name: p.full_tensor().detach() for name, p in wrapped.named_parameters()}, loss.item()


def test_meta_construction_is_bit_equal_in_every_layout():
    """A model on meta gets the same weights whatever the strategy and size, none left out (I01)."""
    truth, loss = run_ranks(meta_bits, 1, "no_shard", 5)[0]
    assert all(value.isfinite().all() and value.abs().sum() > 0 for value in truth.values())
    for world_size, strategy in ((2, "optim"), (3, "optim_grads"), (4, "optim_grads_params")):
        for weights, other in run_ranks(meta_bits, world_size, strategy, 5):
            assert other == pytest.approx(loss, rel=1e-6)
            for name, value in truth.items():
                assert torch.equal(weights[name], value), name


def meta_without_initialize(rank, world_size):
    with torch.device("meta"):
        model = nn.Sequential(Block(6, 10))
    wrap(model, world_size)


def test_meta_needs_initialize():
    """The error names the parameter and the argument."""
    with pytest.raises(Exception, match=r"0\.norm\.weight is on the meta device; pass initialize="):
        run_ranks(functools.partial(meta_without_initialize), 1)


def test_unit_of_is_none_for_plain_modules():
    """Wrapping marks modules; others are left alone."""
    assert unit_of(nn.Linear(2, 2)) is None


def wrap_and_drop(rank, world_size):
    return [alive_after_drop(rank, world_size, strategy) for strategy in STRATEGIES]


def alive_after_drop(rank, world_size, strategy):
    """What of a model that trained a step is still alive after it was dropped."""
    model = wrap(build("fused", True), world_size, strategy=ShardingStrategy(strategy))
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    train_steps(model, optim, rank, 1)
    group = model.groups[0]
    watched = [
        model,
        group,
        group.comms,
        model.engine,
        group.parameters[0].compute,
        group.parameters[0].sharded,
    ]
    alive = [weakref.ref(item) for item in watched]
    del model, optim, group, watched
    for _ in range(3):
        gc.collect()
    return [type(item()).__name__ for item in alive if item() is not None]


def test_a_dropped_model_is_freed():
    """Nothing keeps a wrapped model, its buffers and its communicators once the user let go of them (K15)."""
    assert run_ranks(wrap_and_drop, 2) == [[[]] * len(STRATEGIES)] * 2
