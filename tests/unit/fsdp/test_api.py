"""fully_shard against torch's FSDP2: the same script with a changed import."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh

import megatron.fsdp as ours
from tests.pool import RankError, run_ranks
from tests.unit.fsdp.models import Net, Trace, assert_same, loss_of, tokens_for

VOCAB = 16  # FSDP2 cannot give full_tensor() of uneven shards in this script otherwise


def script(rank, world_size, which, options, microbatches, sync_each, tied):
    """A FSDP2 script. Everything it calls exists in both."""
    lib = {"torch": torch_fsdp, "ours": ours}[which]
    torch.manual_seed(0)
    model = Net(vocab=VOCAB, hidden=8, ffn=16, tied=tied).double()
    outer = options.pop("outer", 1)
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (outer, world_size // outer), mesh_dim_names=names)
    mesh = mesh if outer > 1 else mesh["shard"]
    for block in model.blocks:
        lib.fully_shard(block, mesh=mesh, **options)
    lib.fully_shard(model, mesh=mesh, **options)
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    trace = Trace()
    for step in range(3):
        total = torch.zeros((), dtype=torch.float64)
        for microbatch in range(microbatches):
            model.set_requires_gradient_sync(sync_each or microbatch == microbatches - 1)
            loss = loss_of(model, tokens_for(step, microbatch, rank, VOCAB)) / microbatches
            loss.backward()
            total += loss.detach()
        dist.all_reduce(total)
        trace.losses.append(total.item() / world_size)
        trace.norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor().item())
        trace.gradients = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
        optim.step()
        optim.zero_grad()
    trace.weights = {n: p.full_tensor().detach() for n, p in model.named_parameters()}
    return trace


CASES = [
    ({}, 1, True, False),
    ({}, 3, True, False),
    ({}, 3, False, True),
    ({"reshard_after_forward": False}, 2, False, False),
    ({"outer": 2}, 2, True, False),
    ({"outer": 2}, 3, False, True),
]


@pytest.mark.parametrize("options, microbatches, sync_each, tied", CASES)
def test_same_as_torch_fsdp2(options, microbatches, sync_each, tied):
    """Losses, norms, gradients and weights equal FSDP2's, flat and HSDP, with and without deferred sync (G07)."""
    world = 4 if "outer" in options else 2
    truth = run_ranks(script, world, "torch", dict(options), microbatches, sync_each, tied)[0]
    for trace in run_ranks(script, world, "ours", dict(options), microbatches, sync_each, tied):
        assert_same(trace, truth, 1e-11)


def strategies(rank, world_size):
    traces = {}
    for strategy, sync_each in itertools.product(ours.ShardingStrategy, (True, False)):
        traces[strategy.value, sync_each] = script(
            rank, world_size, "ours", {"strategy": strategy}, 3, sync_each, True
        )
    return traces


def test_every_strategy_is_the_same():
    """All strategies agree, also when every backward synchronises (nothing is scaled twice: G01)."""
    truth = run_ranks(script, 3, "ours", {}, 3, True, True)[0]
    for traces in run_ranks(strategies, 3):
        for trace in traces.values():
            assert_same(trace, truth, 1e-11)


def bad_use(rank, world_size, kind):
    model = Net()
    if kind == "twice":
        ours.fully_shard(model.blocks[0])
        ours.fully_shard(model.blocks[0])
    elif kind == "reshard int":
        ours.fully_shard(model, reshard_after_forward=2)
    elif kind == "list module":
        ours.fully_shard(model.blocks)
    elif kind == "tied after":
        ours.fully_shard(model)
        model.head.weight = model.embedding.weight
        loss_of(model, tokens_for(0, 0, rank))
    elif kind == "unbound optimizer":
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        ours.fully_shard(model)
        loss_of(model, tokens_for(0, 0, rank)).backward()
        optim.step()
    elif kind == "order differs":
        if rank == 1:
            model.blocks[0].fc1 = nn.Linear(10, 17)
            model.blocks[0].fc2 = nn.Linear(17, 10)
        ours.fully_shard(model)
        loss_of(model, tokens_for(0, 0, rank))


@pytest.mark.parametrize(
    "kind, message",
    [
        ("twice", "wrapped already"),
        ("reshard int", "reshard_after_forward=2"),
        ("list module", "ModuleList has no forward"),
        ("tied after", "head.weight was tied to embedding.weight after"),
        ("unbound optimizer", "bind_optimizer"),
        ("order differs", "wrapped different modules"),
    ],
)
def test_bad_use_is_named(kind, message):
    """Wrong use is an error on all ranks, never a hang (F11)."""
    with pytest.raises(RankError, match=message):
        run_ranks(bad_use, 2, kind, timeout=30)


def bound_optimizer(rank, world_size, bind):
    torch.manual_seed(0)
    model = Net().double()
    if bind:
        optim = torch.optim.SGD(
            [{"params": model.head.parameters(), "lr": 0.5}, {"params": model.blocks.parameters()}], lr=0.1
        )
    ours.fully_shard(model)
    if bind:
        ours.bind_optimizer(optim, model)
    else:
        optim = torch.optim.SGD(
            [{"params": model.head.parameters(), "lr": 0.5}, {"params": model.blocks.parameters()}], lr=0.1
        )
    loss_of(model, tokens_for(0, 0, rank)).backward()
    optim.step()
    return {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}


def test_bound_optimizer_keeps_groups():
    """An optimizer made before wrapping and bound does what one made after does, options kept."""
    bound, made_after = run_ranks(bound_optimizer, 2, True)[0], run_ranks(bound_optimizer, 2, False)[0]
    for name, weight in made_after.items():
        assert torch.equal(bound[name], weight), name
