"""FullyShardedDataParallel against single-process autograd."""

from __future__ import annotations

import contextlib
import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.fsdp import (
    FSDPConfig,
    FullyShardedDataParallel,
    OuterStrategy,
    ShardingStrategy,
    data_parallel_placement,
)
from tests.pool import run_ranks
from tests.unit.fsdp.models import Block, FusedLinear, Net, Trace, assert_same, loss_of, oracle, tokens_for

STRATEGIES = [strategy.value for strategy in ShardingStrategy]
OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
}
LINEARS = {"plain": nn.Linear, "fused": FusedLinear}


def build(kind: str, tied: bool) -> Net:
    torch.manual_seed(0)
    return Net(linear=LINEARS[kind], tied=tied).double()


def make_mesh(world_size: int, outer: int):
    if outer == 1:
        return init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",))
    return init_device_mesh("cpu", (outer, world_size // outer), mesh_dim_names=("dp_outer", "fsdp"))


def wrap(model: nn.Module, world_size: int, outer: int = 1, **options) -> FullyShardedDataParallel:
    defaults = {"main_params_dtype": None, "main_grads_dtype": torch.float64}
    config = FSDPConfig(**{**defaults, **options})
    placement = data_parallel_placement(make_mesh(world_size, outer))
    return FullyShardedDataParallel(model, config, placement, (Block, nn.Embedding))


def train(rank, world_size, case, microbatches, steps, optimizer, **options) -> Trace:
    kind, tied, strategy, outer, outer_strategy, reshard, defer = case
    model = wrap(
        build(kind, tied), world_size, outer, strategy=ShardingStrategy(strategy),
        outer_strategy=OuterStrategy(outer_strategy), reshard_after_forward=reshard, defer_communication=defer,
        **options,
    )  # fmt: skip
    optim = OPTIMIZERS[optimizer](model.parameters())
    trace = Trace()
    for step in range(steps):
        model.zero_grad_buffer()
        total = torch.zeros((), dtype=torch.float64)
        for microbatch in range(microbatches):
            last = microbatch == microbatches - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = loss_of(model, tokens_for(step, microbatch, rank)) / microbatches
                loss.backward()
            total += loss.detach()
        model.finish_grad_sync()
        dist.all_reduce(total)
        trace.losses.append(total.item() / world_size)
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        trace.norms.append(norm.full_tensor().item())
        trace.gradients = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}
        optim.step()
    trace.weights = {n: p.full_tensor().detach() for n, p in model.named_parameters()}
    return trace


def cases():
    for kind, tied, strategy in itertools.product(LINEARS, (False, True), STRATEGIES):
        yield (kind, tied, strategy, 1, "no_shard", True, False)


def run_cases(rank, world_size, chosen, microbatches):
    return [train(rank, world_size, case, microbatches, 3, "sgd") for case in chosen]


@pytest.mark.parametrize(
    "world_size, microbatches, part",
    [
        (1, 3, "half"),
        (2, 1, "half"),
        (3, 3, "half"),
        *(pytest.param(w, m, "all", marks=pytest.mark.full) for w in (1, 2, 3) for m in (1, 3)),
    ],
)
def test_equals_one_rank(world_size, microbatches, part):
    """Every strategy, fused or not, tied or not, equals single-process autograd (G01, G02, G03, G10, G19)."""
    chosen = list(cases())
    if part == "half":  # every strategy fused and not, tied and not
        chosen = [case for i, case in enumerate(chosen) if (i // 4 + i) % 2 == world_size % 2]
    truths = {
        (kind, tied): oracle(
            functools.partial(build, kind, tied), world_size, microbatches, 3, OPTIMIZERS["sgd"]
        )
        for kind, tied in {case[:2] for case in chosen}
    }
    for traces in run_ranks(run_cases, world_size, chosen, microbatches, timeout=120):
        for case, trace in zip(chosen, traces, strict=True):
            assert_same(trace, truths[case[:2]], 1e-11)


@pytest.mark.full
def test_eight_ranks():
    """The same on 8 ranks, flat."""
    chosen = list(cases())
    truths = {
        (kind, tied): oracle(functools.partial(build, kind, tied), 8, 2, 3, OPTIMIZERS["sgd"])
        for kind, tied in itertools.product(LINEARS, (False, True))
    }
    for traces in run_ranks(run_cases, 8, chosen, 2, timeout=300):
        for case, trace in zip(chosen, traces, strict=True):
            assert_same(trace, truths[case[:2]], 1e-11)
