"""Optimizers over the shards: whole matrices for Muon, groups, tensors of one rank only."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.fsdp import FSDPConfig, FullyShardedDataParallel, ShardingStrategy, data_parallel_placement
from tests.pool import run_ranks
from tests.unit.fsdp.models import Block, relative
from tests.unit.fsdp.test_wrapper import make_mesh

MUON = {"lr": 0.05, "weight_decay": 0.1}
STEPS = 3


def model_of() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(Block(8, 12) for _ in range(3))).double()


def data(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def optimizers(named) -> list[torch.optim.Optimizer]:
    """Muon for matrices, SGD for the rest, as Muon is meant to be used."""
    named = list(named)
    matrices = [parameter for _, parameter in named if parameter.ndim == 2 and parameter.numel()]
    vectors = [parameter for _, parameter in named if parameter.ndim != 2]
    made: list[torch.optim.Optimizer] = [torch.optim.SGD(vectors, lr=0.1)] if vectors else []
    return made + ([torch.optim.Muon(matrices, **MUON)] if matrices else [])


def train_sharded(rank, world_size):
    """Muon runs on the matrices that this rank holds whole; nothing is gathered for it."""
    config = FSDPConfig(
        strategy=ShardingStrategy.OPTIM_GRADS_PARAMS,
        main_params_dtype=None,
        main_grads_dtype=torch.float64,
        tensor_atomic=True,
    )
    model = FullyShardedDataParallel(
        model_of(), config, data_parallel_placement(make_mesh(world_size, 1)), (Block,)
    )
    local = {name: parameter for name, parameter in model.named_parameters() if parameter.to_local().numel()}
    whole = {name: nn.Parameter(parameter.to_local()) for name, parameter in local.items()}
    assert all(whole[name].shape == parameter.shape for name, parameter in local.items()), (
        "no parameter is cut"
    )
    made = optimizers(whole.items())
    for step in range(STEPS):
        model.zero_grad_buffer()
        model(data(step, rank)).square().mean().backward()
        model.finish_grad_sync()
        for name, parameter in local.items():
            whole[name].grad = parameter.grad.to_local()
        for optimizer in made:
            optimizer.step()
        for group in model.groups:
            group.mark_stale()  # Muon stepped local tensors behind FSDP's back
    return {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}, len(
        local
    )


def test_muon_on_whole_matrices():
    """The tensor_atomic layout: torch's Muon on shards equals Muon on one process."""
    model = model_of()
    made = optimizers(model.named_parameters())
    for step in range(STEPS):
        model.zero_grad()
        for rank in range(2):
            (model(data(step, rank)).square().mean() / 2).backward()
        for optimizer in made:
            optimizer.step()
    results = run_ranks(train_sharded, 2)
    for weights, _ in results:
        for name, parameter in model.named_parameters():
            assert relative(weights[name], parameter.detach()) < 1e-10, name
    held = [count for _, count in results]
    assert min(held) > 0 and sum(held) == len(list(model.parameters()))


def one_adamw_step(rank, world_size, strategy):
    """G20, G19: the first step after wrapping, with groups of their own decay."""
    config = FSDPConfig(strategy=ShardingStrategy(strategy))
    model = FullyShardedDataParallel(
        model_of().bfloat16(), config, data_parallel_placement(make_mesh(world_size, 1)), (Block,)
    )
    named = list(model.named_parameters())
    groups = [
        {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.1, "lr": 0.02},
        {"params": [p for _, p in named if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    before = {name: parameter.full_tensor().detach() for name, parameter in named}
    gradients = []
    for step in range(3):
        model.zero_grad_buffer()
        model(data(step, rank).bfloat16()).float().square().mean().backward()
        model.finish_grad_sync()
        gradients.append({name: parameter.grad.full_tensor() for name, parameter in named})
        optimizer.step()
    assert all(state["step"].item() == 3 for state in optimizer.state.values())
    return before, gradients, {name: parameter.full_tensor().detach() for name, parameter in named}


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_adamw_on_averaged_gradients(strategy):
    """bf16 compute, fp32 main: three steps are plain AdamW on the averaged gradients, groups kept (G19, G20)."""
    before, gradients, after = run_ranks(one_adamw_step, 2, strategy)[0]
    plain = {name: nn.Parameter(value.clone()) for name, value in before.items()}
    groups = [
        {"params": [p for p in plain.values() if p.ndim > 1], "weight_decay": 0.1, "lr": 0.02},
        {"params": [p for p in plain.values() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    for step in gradients:
        for name, value in step.items():
            assert value.dtype == torch.float32
            plain[name].grad = value
        optimizer.step()
    for name, value in after.items():
        torch.testing.assert_close(value, plain[name].detach(), rtol=1e-6, atol=1e-8)
