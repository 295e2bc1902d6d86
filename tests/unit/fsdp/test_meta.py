"""fully_shard on the meta device, in the way of FSDP2 scripts, and the values that models get there."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

import megatron.fsdp as ours
from tests.pool import RankError, run_ranks
from tests.unit.fsdp.models import Net, loss_of, tokens_for

VOCAB = 16


class Titan(nn.Module):
    """A model with a buffer that only `init_weights` fills, as torchtitan's have."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(vocab=VOCAB, hidden=8, ffn=16)
        self.register_buffer("scale", torch.empty(8), persistent=False)

    def init_weights(self) -> None:
        for index, parameter in enumerate(self.parameters()):
            nn.init.constant_(parameter, 0.01 * (index + 1))
            with torch.no_grad():
                parameter.mul_(1.0 if parameter.ndim > 1 else 0.5)
        nn.init.ones_(self.net.norm.weight)
        self.scale = torch.linspace(0.5, 1.5, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.net.embedding(tokens) * self.scale
        for block in self.net.blocks:
            x = block(x)
        return self.net.head(self.net.norm(x))


def titan_script(rank, world_size, which, state):
    """Build on meta, wrap, to_empty, init_weights, load a whole state dict, train; the same lines for both."""
    lib = {"torch": torch_fsdp, "ours": ours}[which]
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp_shard",))
    with torch.device("meta"):
        model = Titan()
    policy = lib.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"mesh": mesh, "mp_policy": policy}
    for index, block in enumerate(model.net.blocks):
        last = index == len(model.net.blocks) - 1
        lib.fully_shard(block, **options, reshard_after_forward=not last)
    lib.fully_shard([model.net.norm, model.net.head], **options, reshard_after_forward=False)
    lib.fully_shard(model, **options)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights()
    first = {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}
    set_model_state_dict(model, copy.deepcopy(state), options=StateDictOptions(full_state_dict=True))
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        model.set_requires_gradient_sync(False, recurse=True)
        for microbatch in range(2):
            if microbatch == 1:
                model.set_requires_gradient_sync(True)
            loss = loss_of(model, tokens_for(step, microbatch, rank, VOCAB)).float() / 2
            loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        total = loss.detach()
        dist.all_reduce(total)
        losses.append([total.item(), norm.full_tensor().item()])
    whole = StateDictOptions(full_state_dict=True)
    weights = get_model_state_dict(model, options=whole)
    moments = get_optimizer_state_dict(model, optimizer, options=whole)["state"]
    return first, losses, weights, {name: value["exp_avg"] for name, value in moments.items()}


def test_a_torchtitan_script_runs_with_a_changed_import():
    """to_empty, init_weights, whole state dicts in and out, mixed precision, lists of modules: FSDP2's losses (I02)."""
    torch.manual_seed(0)
    state = Titan().state_dict()
    theirs = run_ranks(titan_script, 2, "torch", state)[0]
    for first, losses, weights, moments in run_ranks(titan_script, 2, "ours", state):
        for name, value in theirs[0].items():
            assert torch.equal(first[name], value), name
        for mine, other in zip(losses, theirs[1], strict=True):
            assert mine == pytest.approx(other, rel=1e-4)
        for found, truth in ((weights, theirs[2]), (moments, theirs[3])):
            assert found.keys() == truth.keys()
            for name, value in truth.items():
                torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5)


def by_unit(rank, world_size, strategies):
    """Weights drawn by reset_parameters_by_unit under each strategy, tied weight and odd shapes included."""
    drawn = []
    before = torch.get_rng_state()
    for strategy in strategies:
        with torch.device("meta"):
            model = Net(tied=True)
        for block in model.blocks:
            ours.fully_shard(block, strategy=strategy)
        ours.fully_shard(model, strategy=strategy)
        ours.reset_parameters_by_unit(model, seed=7)
        loss = loss_of(model, tokens_for(0, 0, 0)).item()
        drawn.append(({name: p.full_tensor().detach() for name, p in model.named_parameters()}, loss))
    assert torch.equal(before, torch.get_rng_state()), "the global random state is left alone"
    return drawn


def test_reset_parameters_by_unit_does_not_depend_on_the_layout():
    """Foreign modules on meta get the same bits under every strategy and size, none left out (I01)."""
    (truth, loss), *_ = run_ranks(by_unit, 1, ["no_shard"])[0]
    assert all(value.isfinite().all() for value in truth.values())
    assert all(value.std() > 0.05 for value in truth.values() if value.ndim == 2), "drawn, not constant"
    assert truth["blocks.0.norm.weight"].eq(1).all()
    for drawn in run_ranks(by_unit, 3, ["optim", "optim_grads_params"]):
        for weights, other in drawn:
            assert other == pytest.approx(loss, rel=1e-6)
            assert weights.keys() == truth.keys()
            for name, value in truth.items():
                assert torch.equal(weights[name], value), name


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain * self.table


def left_on_meta(rank, world_size, kind):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), NoReset())
    ours.fully_shard(model)
    if kind == "no reset":
        ours.reset_parameters_by_unit(model, 0)
    if kind == "buffer":
        ours.reset_parameters_by_unit(model, 0, lambda module: [p.fill_(1) for p in module.parameters()])
    if kind == "half":
        nn.init.ones_(model[0].weight)
    model(torch.ones(1, 3))


@pytest.mark.parametrize(
    "kind, message",
    [
        ("nothing", "0.weight was built on the meta device and has no value yet; call model.to_empty"),
        ("half", "0.bias was built on the meta device"),
        ("no reset", "NoReset in unit of the root has parameters but no reset_parameters"),
        ("buffer", "buffer 1.table is on the meta device"),
    ],
)
def test_what_was_left_on_meta_is_named(kind, message):
    """Nothing runs on values that nobody set (I01, I02)."""
    with pytest.raises(RankError, match=message):
        run_ranks(left_on_meta, 2, kind, timeout=30)
