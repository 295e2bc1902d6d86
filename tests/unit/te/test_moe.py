"""Models with experts of TE's GroupedLinear: training equals one rank of the torch backend; checkpoints go both ways.

Tiny Mixtral and DeepSeek-V3 (latent attention, groups, expert bias, shared expert, two further tokens) with expert
parallel 2, under every strategy. Fault replays: G05, G13 (idle experts), E08.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.te.engine import device, in_te_process, run_te_ranks
from tests.unit.models.moe import shapes
from tests.unit.models.moe.training import (
    SEED,
    Layout,
    Options,
    Trace,
    assembled,
    backend_class,
    reference,
    train,
)
from tests.unit.train.equivalence import error

LAYOUT = Layout({"data": 2, "expert": 2})
MODELS = {
    "mixtral": shapes.mixtral,
    "deepseek": functools.partial(
        shapes.deepseek, load_balancing=("seq_aux_loss",), aux_loss_coeff=(0.1,), bias_update_rate=0.0
    ),
}
TOLERANCE = 2e-6
"""Of gradients and norms; losses keep 1e-6. On one rank TE's order of sums leaves up to 9e-7."""
CELLS: dict[str, list[Options]] = {
    "mixtral": [
        Options(strategy, backend="te")
        for strategy in ("no_shard", "optim", "optim_grads", "optim_grads_params")
    ],
    "deepseek": [
        Options("optim_grads_params", recompute="moe", forced=True, backend="te"),
        Options("optim", fused=False, forced=True, backend="te"),
    ],
}
MORE: dict[str, list[Options]] = {
    model: [
        Options(strategy, fused, per_token, recompute, forced=model == "deepseek", backend="te")
        for strategy in ("no_shard", "optim", "optim_grads", "optim_grads_params")
        for fused in (True, False)
        for per_token in (False, True)
        for recompute in (None, "full", "moe")
    ]
    for model in MODELS
}


def train_cells(rank: int, world: int, model: str, cells: list[Options]) -> list[Any]:
    """This rank's traces."""
    return [train(rank, world, MODELS[model](dispatcher="alltoall"), LAYOUT, options) for options in cells]


@functools.cache
def expected(model: str, per_token: bool, forced: bool) -> Trace:
    """One rank, torch's layers, plain autograd."""
    return reference(MODELS[model](), per_token, torch.float32, forced)


def check(model: str, cells: list[Options]) -> None:
    by_rank = run_te_ranks(train_cells, LAYOUT.world, model, cells, timeout=60 + 20 * len(cells))
    for index, options in enumerate(cells):
        got, wanted = (
            assembled([traces[index] for traces in by_rank]),
            expected(model, options.per_token, options.forced),
        )
        assert got.losses == pytest.approx(wanted.losses, rel=1e-6), options
        assert got.norms == pytest.approx(wanted.norms, rel=TOLERANCE), options
        for ours, theirs in zip(
            [*got.gradients, got.weights], [*wanted.gradients, wanted.weights], strict=True
        ):
            assert ours.keys() == theirs.keys()
            errors = [(error(ours[name], theirs[name][: ours[name].shape[0]]), name) for name in theirs]
            assert max(errors)[0] < TOLERANCE, (options, max(errors))
        if options.forced:
            idle = [
                f"decoder.layers.1.mlp.experts.linear_fc{fc}.weight{expert}"
                for fc in (1, 2)
                for expert in range(4, 8)
            ]
            assert not any(got.gradients[0][name].any() for name in idle), "idle experts get zeros"


@pytest.mark.parametrize("model", MODELS)
def test_training_equals_the_torch_backend_on_one_rank(model: str) -> None:
    check(model, CELLS[model])


@pytest.mark.full
@pytest.mark.parametrize("model", MODELS)
def test_training_equals_the_torch_backend_everywhere(model: str) -> None:
    check(model, MORE[model])


@pytest.mark.parametrize("model", MODELS)
@in_te_process
def test_a_checkpoint_of_one_backend_loads_in_the_other(model: str) -> None:
    from megatron.models.backends.base import LayerOptions
    from megatron.models.gpt import GPTModel
    from megatron.models.init import Initializer, materialise
    from megatron.parallel.mesh import ParallelMesh

    mesh = ParallelMesh.single()
    models = {}
    for kind, seed in (("te", SEED), ("torch", SEED + 1)):
        backend = backend_class(kind)(LayerOptions.from_mesh(mesh, device="meta"))
        models[kind] = materialise(
            GPTModel(MODELS[model](), backend, mesh), Initializer(seed, mesh), device=device()
        )
    te, plain = models["te"], models["torch"]
    assert te.state_dict().keys() == plain.state_dict().keys()
    te.load_state_dict(plain.state_dict())
    tokens, labels = torch.randint(0, shapes.VOCABULARY, (2, 2, 8)).to(device())
    assert error(te(tokens, labels=labels), plain(tokens, labels=labels)) < 2e-6
    with torch.no_grad():
        for parameter in te.parameters():
            parameter.mul_(1.25)
    plain.load_state_dict(te.state_dict())
    assert error(plain(tokens, labels=labels), te(tokens, labels=labels)) < 2e-6
