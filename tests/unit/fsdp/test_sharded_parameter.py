"""What is made of parameters whose rows are cut unevenly: copies, results, state; and what is saved of them."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import Shard, distribute_tensor

from megatron.fsdp import MixedPrecisionPolicy, fully_shard
from tests.pool import run_ranks
from tests.unit.fsdp.models import Net, loss_of, tokens_for

VOCAB = 11


def build(**options) -> nn.Module:
    torch.manual_seed(0)
    model = Net(vocab=VOCAB, hidden=10, ffn=18).double()
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.full_tensor().detach().clone() for name, parameter in model.named_parameters()}


def full(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


DERIVED = {
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "clone": lambda p: p.clone(),
    "double": lambda p: p.double(),
    "float": lambda p: p.float(),
    "half of it": lambda p: p * 2 - p / 2,
    "with itself": lambda p: p * p.detach() + p.clone(),
    "lerp_": lambda p: p.detach().clone().lerp_(torch.zeros_like(p), 0.1),
    "foreach": lambda p: torch._foreach_add(torch._foreach_mul([p], 2.0), [p])[0],
    "where": lambda p: torch.where(p > 0, p, torch.zeros_like(p)),
    "centred": lambda p: p - p.mean(),
    "with rows' norms": lambda p: p / (1 + p.norm(dim=-1, keepdim=True)),
    "with the whole": lambda p: p + full(p).sum() + p.sum(0),
    "new_zeros": lambda p: p.new_zeros(p.shape) + p,
    "sum": lambda p: p.sum(),
    "columns": lambda p: p.sum(0),
    "rows": lambda p: p.sum(-1),
    "mean": lambda p: p.mean(),
    "mean of columns": lambda p: p.mean(0, keepdim=True),
    "norm": lambda p: p.norm(),
    "norm inf": lambda p: p.norm(float("inf")),
    "norm -inf": lambda p: p.norm(-float("inf")),
    "max": lambda p: p.max(),
    "min": lambda p: p.abs().min(),
    "amax": lambda p: p.amax(0),
    "std": lambda p: p.std(),
    "argmax": lambda p: p.argmax(),
    "any": lambda p: (p > 0).any(),
    "sorted": lambda p: p.sort(dim=0)[0],
    "row": lambda p: p[p.shape[0] - 1],
    "flat": lambda p: p.view(-1),
    "flattened": lambda p: torch.cat([p.reshape(-1), p.flatten()]),
    "transposed": lambda p: p.t() if p.ndim == 2 else p,
    "matmul": lambda p: p.t() @ p if p.ndim == 2 else p,
    "equal": lambda p: torch.tensor(torch.equal(p, p.clone())),
}


def derived(rank, world_size, outer):
    """Faults of what is made of parameters and gradients, and of gradients through it."""
    options = {}
    if outer:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
        options = {"mesh": mesh, "outer_strategy": "optim"}
    model, faults = build(**options), []
    loss_of(model, tokens_for(0, 0, rank, VOCAB)).backward()
    chosen = ("head.weight", "blocks.1.fc1.bias")
    named = {name: parameter for name, parameter in model.named_parameters() if name in chosen}
    tensors = {**named, "grad": named[chosen[0]].grad}
    assert not any(parameter.shard_info.is_even for parameter in named.values())
    for name, tensor in tensors.items():
        truth = tensor.full_tensor().detach()
        for kind, make in DERIVED.items():
            made, expected = full(make(tensor)), make(truth)
            if made.dtype != expected.dtype or not torch.allclose(made, expected):
                faults.append((name, kind))
    for name, parameter in named.items():
        for kind in ("sum", "half of it", "centred", "norm", "max", "std", "row", "matmul"):
            alone = parameter.full_tensor().detach().requires_grad_()
            (gradient,) = torch.autograd.grad(DERIVED[kind](parameter).square().sum(), parameter)
            (expected,) = torch.autograd.grad(DERIVED[kind](alone).square().sum(), alone)
            if not torch.allclose(full(gradient), expected):
                faults.append((name, kind, "gradient"))
    weight = named[chosen[0]]
    before = weight.grad.full_tensor()
    weight.sum().backward()  # no sharded gradient
    if not torch.allclose(weight.grad.full_tensor(), before + 1):
        faults.append("gradients accumulated outside of forward")
    with pytest.raises(NotImplementedError, match=r"aten.zero_.default on a view of a sharded parameter"):
        weight.detach().view(-1).zero_()
    with pytest.raises(
        NotImplementedError, match=r"_foreach_lerp_.* DTensor of shape .* not cut as the sharded"
    ):
        even = distribute_tensor(before, weight.device_mesh, [Shard(0)] * weight.device_mesh.ndim)
        torch._foreach_lerp_([weight.detach(), even], [even, weight.detach()], 0.5)
    return faults


@pytest.mark.parametrize(("world", "outer"), [(3, False), (4, True)])
def test_results_are_those_of_the_whole(world, outer):
    """Also where ranks have no rows, and for shards over two axes."""
    assert run_ranks(derived, world, outer) == [[]] * world


def trained(rank, **options):
    """A model and its optimizer after a step."""
    model = build(**options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loss_of(model, tokens_for(0, 0, rank, VOCAB)).backward()
    optimizer.step()
    return model, optimizer


def differences(model, optimizer, truth, moments):
    """Names of parameters, and of their first moments, that are not what they were."""
    found = [name for name, value in whole(model).items() if not torch.equal(value, truth[name])]
    for (name, parameter), moment in zip(model.named_parameters(), moments, strict=True):
        if not torch.equal(optimizer.state[parameter]["exp_avg"].full_tensor(), moment):
            found.append(f"{name}.exp_avg")
    return found


def forget(model, optimizer):
    """Set parameters and optimizer state to zero."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
            optimizer.state[parameter]["exp_avg"].zero_()


def saved(rank, world_size, folder):
    """Faults of models and optimizers loaded from what was saved of them in each way."""
    model, optimizer = trained(rank)
    truth = whole(model)
    moments = [optimizer.state[parameter]["exp_avg"].full_tensor() for parameter in model.parameters()]
    tokens = tokens_for(1, 0, rank, VOCAB)
    loss, faults = loss_of(model, tokens).item(), []

    def check(kind):
        faults.extend((kind, name) for name in differences(model, optimizer, truth, moments))
        if loss_of(model, tokens).item() != loss:
            faults.append((kind, "loss"))

    for weights_only in (False, True):
        buffer = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
        if len(buffer.getvalue()) > 4 * sum(p.to_local().nbytes for p in model.parameters()) + 60_000:
            faults.append(("torch.save", f"{len(buffer.getvalue())} bytes"))
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=weights_only)
        forget(model, optimizer)
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        check(f"torch.save, weights_only={weights_only}")
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    forget(model, optimizer)
    model.load_state_dict(state[0], assign=True)
    optimizer.load_state_dict(state[1])
    check("deepcopy")
    for kind, save in (("save", dcp.save), ("async_save", lambda *a, **k: dcp.async_save(*a, **k).result())):
        save(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)),
             checkpoint_id=f"{folder}/{kind}")  # fmt: skip
        forget(model, optimizer)
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(state, checkpoint_id=f"{folder}/{kind}")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        check(f"dcp.{kind}")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full_state = get_state_dict(model, optimizer, options=options)
    if rank == 0:
        faults += [name for name, value in full_state[0].items() if not torch.equal(value, truth[name])]
    elif any(full_state):
        faults.append("full state on rank 1")
    for broadcast in (True, False):
        forget(model, optimizer)
        given = [copy.deepcopy(full_state)]  # torch's functions write to it
        if not broadcast:
            dist.broadcast_object_list(given, 0)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        set_model_state_dict(model, given[0][0], options=options)
        set_optimizer_state_dict(model, optimizer, given[0][1], options=options)
        check(f"full state, broadcast={broadcast}")
    with pytest.raises(
        RuntimeError, match=r"cannot be copied; copy it before fully_shard, or use state_dict"
    ):
        copy.deepcopy(model)
    return faults


@pytest.mark.filterwarnings("ignore")
def test_saved_state(tmp_path):
    """What torch saves, copies, gathers or broadcasts of uneven shards loads again, into parameters that stay."""
    assert run_ranks(saved, 2, str(tmp_path)) == [[], []]


def assigned_on_meta(rank, world_size, kind):
    """Faults of a model built on meta and given a whole state, or one that torch distributed."""
    with torch.device("meta"):
        model = Net(vocab=VOCAB, hidden=10, ffn=18).double()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    parameters = list(model.parameters())
    torch.manual_seed(0)
    truth = Net(vocab=VOCAB, hidden=10, ffn=18).double()
    state = truth.state_dict()
    if kind == "distributed":
        state = {name: distribute_tensor(value, parameters[0].device_mesh, model.get_parameter(name).placements)
                 for name, value in state.items()}  # fmt: skip
    if kind == "broadcast":
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, state if rank == 0 else {}, options=options)
    else:
        model.load_state_dict(state, assign=True)
    assert all(new is old for new, old in zip(model.parameters(), parameters, strict=True))
    tokens = tokens_for(0, 0, rank, VOCAB)
    faults = [] if torch.equal(model(tokens), truth(tokens)) else ["output"]
    return faults + [
        name for name, value in whole(model).items() if not torch.equal(value, truth.get_parameter(name))
    ]


@pytest.mark.parametrize("kind", ["whole", "distributed", "broadcast"])
def test_state_given_to_a_model_on_meta(kind):
    """`load_state_dict(assign=True)` of a model on meta keeps FSDP's parameters and gives them their rows."""
    assert run_ranks(assigned_on_meta, 3, kind) == [[], [], []]


def assign_data(parameter):
    """Twice the values through `parameter.data = ...`."""
    parameter.data = parameter.detach() * 2


WRITES = {
    "parameter": lambda p: p.mul_(2),
    "data": lambda p: p.data.mul_(2),
    "data.copy_": lambda p: p.data.copy_(p * 2),
    "data =": assign_data,
    "detach": lambda p: p.detach().mul_(2),
    "to_local": lambda p: p.to_local().mul_(2),
    "foreach": lambda p: torch._foreach_mul_([p], 2.0),
}


def written(rank, world_size, strategy, dtype):
    """Ways to write to parameters that the next forward does not see."""
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    model = build(strategy=strategy, mp_policy=policy)
    torch.manual_seed(0)
    truth = Net(vocab=VOCAB, hidden=10, ffn=18).double()
    tokens, unseen = tokens_for(0, 0, rank, VOCAB), []
    for way, write in WRITES.items():
        with torch.no_grad():
            model(tokens)  # nothing is due now
            for parameter in model.parameters():
                write(parameter)
            for parameter in truth.parameters():
                parameter.mul_(2)
            expected = copy.deepcopy(truth).to(dtype)(tokens)
            if not torch.equal(model(tokens), expected):
                unseen.append(way)
            for parameter in (*model.parameters(), *truth.parameters()):
                parameter.div_(2)
    return unseen


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_writes_are_seen(strategy):
    """The next forward gathers what was written through `.data`, `detach()` or `to_local()`."""
    for dtype in (torch.float64, torch.float32):
        assert run_ranks(written, 3, strategy, dtype) == [[]] * 3
