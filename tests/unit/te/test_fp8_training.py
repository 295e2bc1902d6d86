"""A small GPT of TE's layers trains in FP8 under FSDP as on one rank: delayed and tensorwise scaling."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.models.backends.transformer_engine.settings import Fp8Settings
from tests.te.checks import give_temporary_buffer
from tests.te.engine import compiled, device, extension, in_te_process, load, run_te_ranks
from tests.unit.te.test_fp8 import any_device
from tests.unit.te.test_gpt import MODELS, STRATEGIES, assert_same, batch, loss_of

pytestmark = pytest.mark.skipif(compiled(), reason="counts and compares GEMMs of the emulator")

STEPS, LEARNING_RATE, RANKS = 3, 0.1, 2
RECIPES = ("delayed", "tensorwise")
GEMMS_OF_A_LAYER = 12
"""QKV, projection, fc1, fc2: forward, of the input, of the weight."""
DELAYED_TOLERANCE = 5e-3
MIDDLE = {"first_last_layers_bf16": True}
"""Of three layers only the middle one computes in FP8."""


def build(mesh: Any, settings: Fp8Settings | None, fused: bool) -> tuple[nn.Module, Any]:
    """(three layers on meta, Initializer); ranks of `mesh` share maxima."""
    from megatron.models.backends.base import LayerOptions
    from megatron.models.backends.transformer_engine import EngineSettings, TransformerEngineBackend
    from megatron.models.config import ModelConfig
    from megatron.models.gpt import GPTModel
    from megatron.models.init import Initializer

    load()
    config = ModelConfig(**{**MODELS["llama"], "num_layers": 3})
    options = LayerOptions.from_mesh(mesh, device="meta", fuse_wgrad_accumulation=fused)
    group = mesh.group("dp") if mesh.size("dp") > 1 else None
    with any_device():
        backend = TransformerEngineBackend(options, EngineSettings(fp8=settings), amax_group=group)
    return GPTModel(config, backend, mesh), Initializer(21, mesh)


def forget_maxima() -> None:
    """TE keeps the maxima of delayed scaling, with their process groups, for the life of a process."""
    load()
    import_module("transformer_engine.pytorch.quantization").FP8GlobalStateManager.reset()


def microbatches(recipe: str, step: int, ranks: list[int]) -> list[tuple[Tensor, Tensor]]:
    """What the ranks see. Delayed scaling shares maxima of the ranks, so that one rank must see all at once."""
    data = [batch(step, 0, rank) for rank in ranks]
    if recipe == "delayed":
        return [(torch.cat([tokens for tokens, _ in data]), torch.cat([labels for _, labels in data]))]
    return data


def train(
    rank: int, world_size: int, options: dict[str, Any] | None, strategy: str, fused: bool = True
) -> Any:
    """(loss of each step, {name: last gradient}, {name: weight}, [whether each GEMM was in FP8])."""
    from megatron.fsdp import FSDPConfig, FullyShardedDataParallel, ShardingStrategy
    from megatron.models.block import Block
    from megatron.models.gpt import Embedding
    from megatron.parallel.mesh import ParallelMesh, ParallelSizes
    from megatron.train.build import placement_callback

    forget_maxima()
    mesh = ParallelMesh(ParallelSizes(data=world_size), device())
    settings = None if options is None else Fp8Settings(**options)
    recipe = "tensorwise" if settings is None else settings.recipe
    gpt, initializer = build(mesh, settings, fused)
    config = FSDPConfig(strategy=ShardingStrategy(strategy))
    placement = placement_callback(mesh, per_token=False)
    wrapped = FullyShardedDataParallel(gpt, config, placement, (Block, Embedding), initialize=initializer)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=LEARNING_RATE)
    share = RANKS if recipe == "delayed" and world_size == 1 else 1
    log = extension().gemm_log.records
    log.clear()
    losses, gradients = [], {}
    ranks = [rank] if world_size > 1 else list(range(RANKS))
    for step in range(STEPS):
        wrapped.zero_grad_buffer()
        data = microbatches(recipe, step, ranks)
        total = torch.zeros(())
        for index, one in enumerate(data):
            with torch.autograd.set_grad_enabled(True) if index == len(data) - 1 else wrapped.no_sync():
                loss = loss_of(wrapped, one)
                (
                    loss * share
                ).backward()  # gradients as large as a rank's: the first scale is 1 for all sizes
            total += loss.detach() / len(data) / world_size
        wrapped.finish_grad_sync()
        wrapped.scale_gradients(1 / (share * len(data)))
        gradients = {name: p.grad.full_tensor().clone() for name, p in wrapped.named_parameters()}
        optimizer.step()
        if world_size > 1:
            torch.distributed.all_reduce(total)
        losses.append(total.item())
    with torch.no_grad():
        weights = {name: p.full_tensor().clone() for name, p in wrapped.named_parameters()}
    return losses, gradients, weights, [record.float8 for record in log]


@pytest.fixture(scope="module")
def alone() -> dict[Any, Any]:
    """Runs of one rank, made once."""
    return {}


def of_one_rank(alone: dict[Any, Any], options: dict[str, Any] | None) -> Any:
    """See `alone`."""
    key = repr(options)
    if key not in alone:
        alone[key] = run_te_ranks(train, 1, options, "no_shard")[0]
    return alone[key]


FULL = [pytest.param(strategy, marks=pytest.mark.full) for strategy in STRATEGIES[1:3]]


@pytest.mark.parametrize("strategy", [STRATEGIES[0], *FULL, STRATEGIES[3]])
@pytest.mark.parametrize("recipe", RECIPES)
def test_training_in_fp8_equals_one_rank(alone: Any, recipe: str, strategy: str) -> None:
    """Tensorwise: bit for bit. Delayed (see `microbatches`): one sum instead of two, so that a value may round to
    its FP8 neighbour.
    """
    options = {"recipe": recipe}
    losses, gradients, weights, float8 = of_one_rank(alone, options)
    assert sum(float8) == 3 * GEMMS_OF_A_LAYER * STEPS * (1 if recipe == "delayed" else RANKS)
    for got in run_te_ranks(train, RANKS, options, strategy):
        if recipe == "tensorwise":
            assert got[0] == losses
            for name, want in gradients.items():
                assert torch.equal(got[1][name], want), f"gradient of {name}"
                assert torch.equal(got[2][name], weights[name]), name
            continue
        assert got[0] == pytest.approx(losses, rel=DELAYED_TOLERANCE)
        assert_same("gradient", got[1], gradients, DELAYED_TOLERANCE)
        assert_same("weight", got[2], weights, DELAYED_TOLERANCE)


@pytest.mark.parametrize("recipe", RECIPES)
def test_only_the_middle_layer_is_in_fp8(alone: Any, recipe: str) -> None:
    """The first and last compute in the parameters' dtype; the loss is near that without FP8, and not equal."""
    losses, _, _, float8 = of_one_rank(alone, {"recipe": recipe} | MIDDLE)
    assert sum(float8) == GEMMS_OF_A_LAYER * STEPS * (1 if recipe == "delayed" else RANKS)
    assert len(float8) > sum(float8)
    plain = of_one_rank(alone, None)
    assert not any(plain[3])
    assert 0 < abs(losses[0] - plain[0][0]) < 0.05 * plain[0][0]


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_fused_gradients_are_the_unfused_ones_in_fp8(alone: Any, recipe: str, strategy: str) -> None:
    """The main_grad contract: kept buffers are added to, temporary ones overwritten."""
    fused = run_te_ranks(train, 1, {"recipe": recipe}, strategy)[0]
    unfused = run_te_ranks(train, 1, {"recipe": recipe}, strategy, False)[0]
    assert fused[0] == unfused[0]
    for name, want in unfused[1].items():
        assert torch.equal(fused[1][name], want), f"gradient of {name}"


WIDTH, ROWS = 32, 48
LAYERS = ("Linear", "LayerNormLinear", "LayerNormMLP", "LayerNormMLP-swiglu", "GroupedLinear")


def layer(kind: str) -> nn.Module:
    """One of TE's layers, fused, WIDTH wide."""
    te, options = load(), {"device": device(), "fuse_wgrad_accumulation": True}
    if kind == "GroupedLinear":
        return te.GroupedLinear(3, WIDTH, WIDTH, **options)
    if kind.startswith("LayerNormMLP"):
        activation = kind.partition("-")[2] or "gelu"
        return te.LayerNormMLP(WIDTH, 2 * WIDTH, activation=activation, **options)
    return getattr(te, kind)(WIDTH, WIDTH, **options)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", LAYERS)
@in_te_process
def test_layers_write_main_grad_in_fp8(kind: str, recipe: str) -> None:
    """Over NaN where the grant is to overwrite; near what fp32 gives, the idle expert's zeros included."""
    from megatron.models.backends.transformer_engine.fp8 import fp8_autocast, make_recipe

    forget_maxima()
    with any_device():
        made = make_recipe(load(), Fp8Settings(recipe=recipe))
    module, results = layer(kind), []
    x = torch.randn(ROWS, WIDTH, device=device())
    weights = {name: p for name, p in module.named_parameters() if p.dim() == 2}
    for used in (made, None):
        for weight in weights.values():
            give_temporary_buffer(weight)
        value = x.clone().requires_grad_()
        with fp8_autocast(load(), used, None):
            y = module(value, [32, 0, 16]) if kind == "GroupedLinear" else module(value)
        y.backward(torch.ones_like(y))
        results.append(
            {name: w.main_grad for name, w in weights.items()} | {"x": value.grad, "y": y.detach()}
        )
    for name, want in results[1].items():
        got = results[0][name]
        error = (got - want).norm() / want.norm().clamp(min=1e-6)
        assert error < 0.1, f"{name}: {error}"
        assert want.norm() == 0 or error > 0, f"{name} was not computed in FP8"
