"""One scale: custom divisors, per-token loss, the same data everywhere, mixed dtypes in a unit. Exact numbers."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from megatron.fsdp import (
    DataParallelPlacement,
    FSDPConfig,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from tests.pool import run_ranks
from tests.unit.fsdp.test_main_grad import Layer
from tests.unit.fsdp.test_wrapper import STRATEGIES, make_mesh


def divided(rank, world_size):
    """Gradients under each strategy, flat and 2 x 2, of microbatches 1, 10, 100 times (rank + 1), divided by 5."""
    found = {}
    for strategy in STRATEGIES:
        for outer in (1, 2):
            for microbatches in (1, 3):
                model = nn.Sequential(Layer(nn.Linear))
                fully_shard(model[0], mesh=make_mesh(world_size, outer), strategy=strategy)
                fully_shard(model, mesh=make_mesh(world_size, outer), strategy=strategy)
                model[0].set_gradient_divide_factor(5.0)
                for microbatch in range(microbatches):
                    model.set_is_last_backward(microbatch == microbatches - 1)
                    model.set_requires_all_reduce(microbatch == microbatches - 1)
                    gradient = torch.full((1, 5), (rank + 1) * 10.0**microbatch)
                    model(torch.ones(1, 3, requires_grad=True)).backward(gradient)
                values = model[0].linear.weight.grad.full_tensor().unique().tolist()
                found[strategy, outer, microbatches] = values
    return found


def test_a_custom_divisor_scales_once():
    """The sum over ranks (1+2+3+4) of the sum over microbatches, divided by 5, flat as hybrid (G01, G07)."""
    for found in run_ranks(divided, 4):
        for (strategy, outer, microbatches), values in found.items():
            want = 10.0 * (111 if microbatches == 3 else 1) / 5
            assert values == [want], f"{strategy}, outer {outer}: {values}"


TOKENS = (7, 1, 0, 4)


def per_token(rank, world_size):
    """Norm and gradient of a loss that is a sum over unequal tokens, scaled once by 1 / all tokens."""
    found = {}
    for strategy, outer in [*((strategy, 1) for strategy in STRATEGIES), ("optim_grads_params", 2)]:
        mesh = make_mesh(world_size, outer)
        inner = mesh if outer == 1 else mesh["fsdp"]
        placement = DataParallelPlacement(inner, None if outer == 1 else mesh["dp_outer"], 1.0)
        config = FSDPConfig(ShardingStrategy(strategy), main_grads_dtype=torch.float64)
        model = FullyShardedDataParallel(rows_model(), config, lambda *_, p=placement: p, (nn.Linear,))
        for microbatch in range(2):
            x = tokens_of(rank)[microbatch::2].requires_grad_()
            model(x).square().sum().backward()
        total = torch.tensor(float(TOKENS[rank]))
        dist.all_reduce(total)
        model.finish_grad_sync()
        model.scale_gradients(1 / total)
        gradients = [p.grad for p in model.parameters()]
        norm = nn.utils.get_total_norm(gradients).full_tensor().item()
        found[strategy, outer] = norm, gradients[0].full_tensor()
    return found


def rows_model() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).double()


def tokens_of(rank: int) -> torch.Tensor:
    return torch.randn(TOKENS[rank], 3, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def test_per_token_loss_over_unequal_ranks():
    """Every strategy and mesh has norm and gradient of the concatenated batch, a rank without tokens too (G21)."""
    model = rows_model()
    tokens = torch.cat([tokens_of(rank) for rank in range(4)])
    (model(tokens).square().sum() / len(tokens)).backward()
    gradients = [p.grad for p in model.parameters()]
    norm = nn.utils.get_total_norm(gradients).item()
    for found in run_ranks(per_token, 4):
        for cell, (value, gradient) in found.items():
            assert abs(value - norm) < 1e-6 * norm, cell
            torch.testing.assert_close(gradient, gradients[0], rtol=1e-6, atol=1e-9)


def alike(rank, world_size):
    """Gradients of the same data on all ranks; dtypes of a unit that holds a bf16 linear and an fp32 norm."""
    values = {}
    for strategy in STRATEGIES:
        model = Layer(nn.Linear)
        fully_shard(model, strategy=strategy)
        model(torch.ones(1, 3, requires_grad=True)).backward(torch.full((1, 5), 3.0))
        values[strategy] = model.linear.weight.grad.full_tensor().unique().tolist()
    unit = nn.Sequential(nn.Linear(4, 6, bias=False, dtype=torch.bfloat16), nn.Identity(), nn.LayerNorm(6))
    unit[1].forward = lambda x: x.float()
    fully_shard(unit, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    seen = []
    unit[2].register_forward_pre_hook(lambda module, _args: seen.append(module.weight.dtype))
    unit[0].register_forward_pre_hook(lambda module, _args: seen.append(module.weight.dtype))
    unit(torch.ones(2, 4, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    gradients = [parameter.grad.dtype for parameter in unit.parameters()]
    return values, seen, gradients, [parameter.dtype for parameter in unit.parameters()]


def test_the_same_data_and_mixed_dtypes():
    """The mean of equal gradients is each, not their sum (G23); parameters of a unit keep their dtypes (F18)."""
    for values, seen, gradients, dtypes in run_ranks(alike, 2):
        assert values == {strategy: [3.0] for strategy in STRATEGIES}
        assert seen == [torch.bfloat16, torch.float32]
        assert gradients == dtypes == [torch.bfloat16, torch.float32, torch.float32]
