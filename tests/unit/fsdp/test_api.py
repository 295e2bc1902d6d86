"""fully_shard against torch's FSDP2: the same script with a changed import."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import megatron.fsdp as ours
from tests.pool import RankError, run_ranks
from tests.unit.fsdp.models import Block, Net, Trace, assert_same, loss_of, tokens_for

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


CASES = {
    2: [
        ({}, 1, True, False),
        ({}, 3, True, False),
        ({}, 3, False, True),
        ({"reshard_after_forward": False}, 2, False, False),
    ],
    4: [
        ({"outer": 2}, 2, True, False),
        ({"outer": 2}, 3, False, True),
        ({"reshard_after_forward": 2}, 2, True, True),
    ],
}


def scripts(rank, world_size, which, cases):
    return [script(rank, world_size, which, dict(options), *case) for options, *case in cases]


@pytest.mark.parametrize("world_size", CASES)
def test_same_as_torch_fsdp2(world_size):
    """Losses, norms, gradients and weights equal FSDP2's: flat, HSDP, a smaller mesh after forward, deferred (G07)."""
    cases = CASES[world_size]
    truths = run_ranks(scripts, world_size, "torch", cases)[0]
    for traces in run_ranks(scripts, world_size, "ours", cases):
        for trace, truth in zip(traces, truths, strict=True):
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
    for traces in run_ranks(strategies, 3):
        truth = traces["no_shard", False]
        for trace in traces.values():
            assert_same(trace, truth, 1e-11)


def kept_ranks(rank, world_size):
    """Elements that travel and stay for a unit of 64 between forward and backward, by `reshard_after_forward`."""
    found = []
    for setting in (True, 2, 4, 1):
        model = nn.Sequential(
            nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        )
        for layer in model:
            ours.fully_shard(layer, reshard_after_forward=setting)
        ours.fully_shard(model)
        x = torch.ones(2, 8, requires_grad=True)
        model(x).sum().backward()  # from now on the order is known
        group = model[0]._fsdp_unit.groups[0]
        output = model(x)
        kept = 0 if group.kept is None else group.kept[0].numel()
        stays = 64 if group.gathered else kept
        output.sum().backward()
        comm = group.comms.within(2)
        calls = comm.traffic["all_gather"].calls if comm.traffic else 0
        comm.traffic.clear()
        found.append((stays, calls, group.kept is None and not group.gathered))
    return found


def test_reshard_to_a_smaller_mesh():
    """`reshard_after_forward=2` of 4: half stays, backward gathers among 2; 4 is True and 1 is False, as in FSDP2.

    The first backward gathers all three layers again; once the order is known, the last one stays for its backward.
    """
    for found in run_ranks(kept_ranks, 4):
        assert found == [(0, 0, True), (32, 5, True), (0, 0, True), (64, 0, True)]


class Encoder(Net):
    """A model with a method beside forward."""

    def logits(self, tokens):
        return Net.forward(self, tokens)


def bad_use(rank, world_size, kind):
    model = Encoder()
    if kind == "twice":
        ours.fully_shard(model.blocks[0])
        ours.fully_shard(model.blocks[0])
    elif kind == "reshard int":
        ours.fully_shard(model, reshard_after_forward=3)
    elif kind == "offload":
        ours.fully_shard(model, offload_policy=ours.CPUOffloadPolicy())
    elif kind == "integers":
        model.head.weight = nn.Parameter(torch.zeros(3, 3, dtype=torch.uint8), requires_grad=False)
        ours.fully_shard(model)
    elif kind == "tensor parallel":
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
        model.blocks[0].fc1.weight = nn.Parameter(
            distribute_tensor(model.blocks[0].fc1.weight, mesh, [Shard(0)])
        )
        ours.fully_shard(model)
    elif kind == "to":
        ours.fully_shard(model).to(torch.bfloat16)
    elif kind == "to inside":
        ours.fully_shard(model).blocks[0].to(torch.bfloat16)
        model(tokens_for(0, 0, rank))
    elif kind == "list module":
        ours.fully_shard(model.blocks)
    elif kind == "tied after":
        ours.fully_shard(model)
        model.head.weight = model.embedding.weight
        loss_of(model, tokens_for(0, 0, rank))
    elif kind == "rank outside":
        ours.fully_shard(model, mesh=DeviceMesh("cpu", [0], mesh_dim_names=("shard",)))
    elif kind == "outer without axis":
        ours.fully_shard(model, outer_strategy="optim")
    elif kind in ("other method", "forward itself"):
        ours.fully_shard(model)
        model.eval()
        model(tokens_for(0, 0, rank))
        model.logits(tokens_for(0, 0, rank)) if kind == "other method" else model.forward(
            tokens_for(0, 0, rank)
        )
    elif kind == "wrapped by both":
        ours.fully_shard(model.blocks[0])
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",))
        placement = ours.data_parallel_placement(mesh)
        ours.FullyShardedDataParallel(model, ours.FSDPConfig(), placement, (Block,))
    elif kind == "two units":
        ours.fully_shard([model.blocks[0], model.blocks[1]])
        ours.fully_shard([model.blocks[1], model.blocks[2]])
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
        ("reshard int", "reshard_after_forward=3 does not divide the 2 ranks"),
        ("integers", r"head.weight has dtype torch.uint8; .* ignored_params"),
        ("tensor parallel", r"blocks.0.fc1.weight is a DTensor on mesh .*tp=2.* ignored_params"),
        (
            "to",
            r"torch.float32 on cpu; they cannot become torch.bfloat16 on cpu after wrapping.* or use mp_policy",
        ),
        (
            "to inside",
            r"tensor of parameter blocks.0.norm.weight was replaced after wrapping .* use mp_policy",
        ),
        ("offload", r"offload_policy CPUOffloadPolicy\(pin_memory=True\) is not supported"),
        ("list module", "ModuleList has no forward"),
        ("rank outside", r"rank 1 is not in the mesh of ranks \[0\]"),
        ("outer without axis", "outer_strategy='optim' needs a 2-D mesh"),
        (
            "other method",
            r"logits\(\) of unit .* not gathered.*register_fsdp_forward_method\(module, 'logits'\)",
        ),
        ("forward itself", r"forward\(\) of unit .* call the module itself, not its forward\(\)"),
        ("wrapped by both", "is wrapped already; wrap it once"),
        ("two units", "wrapped already; wrap each module once"),
        ("tied after", "head.weight was tied to embedding.weight after"),
        ("unbound optimizer", "bind_optimizer"),
        ("order differs", "wrapped different modules"),
    ],
)
def test_bad_use_is_named(kind, message):
    """Wrong use is an error on all ranks, never a hang (F09, F11)."""
    with pytest.raises(RankError, match=message):
        run_ranks(bad_use, 2, kind)


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


def compiled(rank, world_size):
    """Losses of three steps: eager, blocks compiled in place, wrapped by torch.compile, and compiled after wrapping."""
    losses = {}
    for how in ("eager", "in place", "wrapped", "after"):
        torch.manual_seed(0)
        model = Net(layers=2).double()
        for index, block in enumerate(model.blocks):
            if how == "in place":
                block.compile(backend="aot_eager", fullgraph=True)
            elif how == "wrapped":
                model.blocks[index] = block = torch.compile(block, backend="aot_eager", fullgraph=True)
            ours.fully_shard(block)
            if how == "after":
                block.compile(backend="aot_eager", fullgraph=True)
        ours.fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses[how] = []
        for step in range(3):
            loss = loss_of(model, tokens_for(step, 0, rank))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[how].append(loss.item())
    return losses


def test_compiled_blocks_train_the_same():
    """torch.compile of the blocks, whole graphs: FSDP's hooks stay outside."""
    for losses in run_ranks(compiled, 2, timeout=120):
        assert losses["eager"][2] != losses["eager"][0]
        for how, found in losses.items():
            assert found == pytest.approx(losses["eager"], rel=1e-9), how
