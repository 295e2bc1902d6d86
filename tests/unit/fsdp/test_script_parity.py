"""What FSDP2 scripts do beside forward, backward and step: the same with a changed import, or a named error."""

from __future__ import annotations

import copy
import dataclasses
import inspect

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh

import megatron.fsdp as ours
from tests.pool import run_ranks
from tests.unit.fsdp.models import Block, Net, loss_of, tokens_for

LIBRARIES = {"torch": torch_fsdp, "ours": ours}
VOCAB = 16  # FSDP2's full_tensor() of uneven shards is not at issue here


def build(which: str, hidden: int = 10, **options) -> nn.Module:
    torch.manual_seed(0)
    model = Net(vocab=VOCAB, hidden=hidden, ffn=18).double()
    for block in model.blocks:
        LIBRARIES[which].fully_shard(block, **options)
    return LIBRARIES[which].fully_shard(model, **options)


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.full_tensor().detach().clone() for name, parameter in model.named_parameters()}


def optimizer_in_backward(rank, world_size, which):
    """Weights after two backwards whose hooks step an optimizer for each parameter, and the number of hook calls."""
    model, calls = build(which, hidden=8), []
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def step(parameter):
        calls.append(parameter)
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for index in range(2):
        loss_of(model, tokens_for(index, 0, rank, VOCAB)).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    return whole(model), len(calls)


def test_optimizer_in_backward():
    """Post-accumulate-grad hooks of the sharded parameters run once a backward, on the reduced gradient."""
    (truth, calls), (found, our_calls) = (
        run_ranks(optimizer_in_backward, 2, which)[0] for which in LIBRARIES
    )
    assert calls == our_calls == 2 * len(truth)
    for name, weight in truth.items():
        torch.testing.assert_close(found[name], weight, msg=name)


def parameters_of(function) -> list[tuple]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def test_same_methods_and_parameters():
    """What torch's front end has, ours has, with the same parameters and defaults; we add to the end only."""
    methods = {
        name: method
        for name, method in vars(torch_fsdp.FSDPModule).items()
        if inspect.isfunction(method) and not name.startswith("_")
    }
    assert len(methods) > 20
    for name, method in methods.items():
        assert parameters_of(getattr(ours.FSDPModule, name)) == parameters_of(method), name
    register = "register_fsdp_forward_method"
    assert parameters_of(getattr(ours, register)) == parameters_of(getattr(torch_fsdp, register))
    names = [[name for name, _, _ in parameters_of(LIBRARIES[which].fully_shard)] for which in LIBRARIES]
    assert names[1] == [*names[0], "strategy", "outer_strategy"]
    fields = [
        [each.name for each in dataclasses.fields(LIBRARIES[which].MixedPrecisionPolicy)]
        for which in LIBRARIES
    ]
    assert fields[1] == fields[0]


class Doubling(Block):
    """A block with a method beside forward."""

    def doubled(self, x):
        return 2 * Block.forward(self, x)


def inner_first(rank, world_size, strategy):
    """Faults of inner units that are used before the model's first forward, and between its forwards."""
    torch.manual_seed(0)
    truth = nn.Sequential(Doubling(10, 18), Doubling(10, 18), nn.Linear(10, 3)).double()
    model = copy.deepcopy(truth)
    for block in model[:2]:
        ours.fully_shard(block, strategy=strategy)
        ours.register_fsdp_forward_method(block, "doubled")
    ours.fully_shard(model, strategy=strategy)
    x, faults = torch.randn(4, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), []
    model[1].set_reduce_scatter_max_input_buffers(1)
    model[0].unshard()
    if not torch.equal(model[0].fc1.weight, truth[0].fc1.weight):
        faults.append("unshard")
    model[0].reshard()
    optimizer, alone = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, truth))
    for step in range(3):
        with torch.no_grad():
            if not torch.allclose(model[1].doubled(x), truth[1].doubled(x)):
                faults.append(f"method, step {step}")
            if not torch.allclose(model[0](x), truth[0](x)):
                faults.append(f"inner forward, step {step}")
        for each, stepped in ((model, optimizer), (truth, alone)):
            (each(x) if step != 1 else each[1].doubled(x)).square().mean().backward()
            stepped.step()
            stepped.zero_grad()
    faults += [
        name
        for (name, parameter), expected in zip(model.named_parameters(), truth.parameters(), strict=True)
        if not torch.allclose(parameter.full_tensor(), expected)
    ]
    return faults


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_inner_units_before_the_first_forward(strategy):
    """Methods of inner units belong to the outermost wrapped module from the start; also a backward of one alone."""
    assert run_ranks(inner_first, 2, strategy) == [[], []]


class Scaled(nn.Module):
    """A linear layer with a 0-dim parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 7)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.linear(x) * self.scale


def slice_of_a_larger_mesh(rank, world_size, outer):
    """Norms, clipped gradients and weights after steps on (replicate, shard) of a 3-D mesh, and those of one rank."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pipeline", "replicate", "shard"))
    torch.manual_seed(0)
    alone = Scaled().double()
    model = ours.fully_shard(copy.deepcopy(alone), mesh=mesh["replicate", "shard"], outer_strategy=outer)
    x = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    results = []
    for each in (model, alone):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1)
        for _ in range(2):
            each(x).square().mean().backward()
            norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.1, order) for order in (float("inf"), 2)]
            gradients = [parameter.grad for parameter in each.parameters()]
            found = [*norms, *gradients, *each.parameters()]
            found = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in found]
            found = [one.detach().clone() for one in found]
            optimizer.step()
            optimizer.zero_grad()
        results.append(found)
    return results


@pytest.mark.parametrize("outer", ["no_shard", "optim"])
def test_slice_of_a_larger_mesh(outer):
    """HSDP and HFSDP on two axes of a 3-D mesh, with a 0-dim parameter, clip and step as one rank does."""
    for found, expected in run_ranks(slice_of_a_larger_mesh, 4, outer):
        torch.testing.assert_close(found, expected)
