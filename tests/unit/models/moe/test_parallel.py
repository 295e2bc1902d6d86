"""Losses, balancing losses, norms, gradients, expert bias and weights do not depend on the layout ("One truth").

EP, ETP, TP with and without SP, CP, HSDP x dispatchers x strategies x fused x per-token x recompute, against one rank
and plain autograd. The default run visits every layout and every pair of options; --full runs the whole product.
C01, C07, E01, E03, E10, E11, E12, E13, G05, G13: norms and clipping over several meshes, strengths of losses, scale of
expert gradients, replicas, dispatchers, idle experts.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch

from megatron.models.config import ModelConfig
from tests.pool import run_ranks
from tests.unit.models.moe import shapes
from tests.unit.models.moe.training import (
    CLIP,
    Layout,
    Options,
    Trace,
    assembled,
    assert_one_order,
    recorded,
    reference,
    train,
)
from tests.unit.train.equivalence import error
from tests.unit.train.test_equivalence import pairwise_cover

MODELS = {
    "mixtral": shapes.mixtral,
    "deepseek": lambda **changes: shapes.deepseek(
        **{"load_balancing": ("seq_aux_loss",), "aux_loss_coeff": (0.1,), **changes}
    ),
}
LAYOUTS = {
    "ep2": Layout({"data": 2, "expert": 2}),
    "ep4": Layout({"data": 4, "expert": 4}),
    "dp4-ep2": Layout({"data": 4, "expert": 2}),
    "tp2-sp-ep2-etp2": Layout({"tensor": 2, "data": 2, "expert": 2, "expert_tensor": 2}, True),
    "tp2-ep4": Layout({"tensor": 2, "data": 2, "expert": 4}),
    "cp2-ep2": Layout({"context": 2, "data": 2, "expert": 2}),
    "pp2-ep2": Layout({"pipeline": 2, "data": 2, "expert": 2}),
    "hsdp-ep2": Layout({"data": 4, "data_outer": 2, "expert": 2}),
    "tp2-sp-pp2-ep2": Layout({"tensor": 2, "pipeline": 2, "data": 2, "expert": 2}, True),
    "cp2-dp4-ep4": Layout({"context": 2, "data": 4, "expert": 4}),
    "tp2-cp2-ep2-etp2": Layout({"tensor": 2, "context": 2, "data": 2, "expert": 2, "expert_tensor": 2}),
}
AXES: dict[str, tuple[Any, ...]] = {
    "layout": tuple(LAYOUTS),
    "dispatcher": ("alltoall", "allgather"),
    "model": tuple(MODELS),
    "strategy": ("optim_grads_params", "no_shard", "optim", "optim_grads"),
    "fused": (True, False),
    "per_token": (False, True),
    "recompute": (None, "full", "moe"),
}


def is_possible(cell: tuple[Any, ...]) -> bool:
    values = dict(zip(AXES, cell, strict=True))
    return not (values["layout"] == "hsdp-ep2" and values["strategy"] == "no_shard")


OPTIONS_COVER = pairwise_cover(list(AXES.values())[1:])
COVER = [(layout, *options) for layout, options in zip(itertools.cycle(LAYOUTS), OPTIONS_COVER)]
REST = [cell for cell in itertools.product(*AXES.values()) if cell not in COVER and is_possible(cell)]


@functools.cache
def expected(model: str, per_token: bool, dtype: torch.dtype) -> Trace:
    return reference(MODELS[model](), per_token, dtype)


def check(config: ModelConfig, layout: Layout, options: Options, wanted: Trace) -> None:
    tolerance = 1e-9 if options.double else 1e-6
    assert min(wanted.norms) > CLIP
    results = run_ranks(train, layout.world, config, layout, options, timeout=240)
    got = assembled(results)
    for trace, _ in results:
        assert trace.losses == pytest.approx(wanted.losses, rel=tolerance)
        assert trace.norms == pytest.approx(wanted.norms, rel=tolerance)
        for ours, theirs in zip(trace.auxiliary, wanted.auxiliary, strict=True):
            assert ours == pytest.approx(theirs, rel=tolerance)
    for ours, theirs in zip(
        [*got.gradients, got.weights, got.buffers],
        [*wanted.gradients, wanted.weights, wanted.buffers],
        strict=True,
    ):
        assert ours.keys() == theirs.keys()
        errors = [(error(ours[name], theirs[name][: ours[name].shape[0]]), name) for name in theirs]
        worst = max(errors, default=(0.0, ""))
        assert worst[0] < tolerance, worst


def run_cell(cell: tuple[Any, ...]) -> None:
    values = dict(zip(AXES, cell, strict=True))
    model, layout, dispatcher = values.pop("model"), values.pop("layout"), values.pop("dispatcher")
    config = MODELS[model](dispatcher=dispatcher)
    options = Options(**values, double=model == "deepseek")
    check(config, LAYOUTS[layout], options, expected(model, options.per_token, options.dtype))


def test_the_cover_is_one():
    assert len(COVER) >= len(LAYOUTS) and all(map(is_possible, COVER))


@pytest.mark.parametrize("cell", COVER, ids=str)
def test_equals_one_rank(cell):
    run_cell(cell)


@pytest.mark.full
@pytest.mark.parametrize("cell", REST, ids=str)
def test_equals_one_rank_everywhere(cell):
    run_cell(cell)


@pytest.mark.parametrize("recompute", [None, "full"])
def test_loss_of_the_step_so_far(recompute):
    """E04: at equal dp; recompute does not count a microbatch twice."""
    layout = Layout({"tensor": 2, "context": 2, "expert": 4}, True)
    config = shapes.deepseek(dispatcher="alltoall")
    options = Options(recompute=recompute, double=True)
    check(config, layout, options, reference(config, False, options.dtype))


@pytest.mark.parametrize(
    ("layout", "dispatcher", "recompute"),
    [("ep2", "alltoall", "full"), ("ep4", "alltoall", None), ("ep4", "allgather", "moe")],
)
def test_ranks_without_tokens(layout, dispatcher, recompute):
    """E08, G13: every token goes to the first half of the experts; the others' gradients are zero, and it goes on."""
    config = MODELS["deepseek"](dispatcher=dispatcher, bias_update_rate=0.0)
    options = Options(recompute=recompute, double=True, forced=True)
    wanted = reference(config, False, options.dtype, forced=True)
    check(config, LAYOUTS[layout], options, wanted)
    assert not wanted.gradients[0]["decoder.layers.1.mlp.experts.linear_fc1.weight4"].any()
    assert wanted.gradients[0]["decoder.layers.1.mlp.experts.linear_fc1.weight3"].any()


@pytest.mark.parametrize(
    ("layout", "strategy", "fused", "dispatcher"),
    [
        (Layout({"tensor": 2, "expert_tensor": 2}), "optim_grads_params", True, "allgather"),
        (LAYOUTS["tp2-sp-ep2-etp2"], "no_shard", False, "alltoall"),
    ],
    ids=["tp2", "tp2-sp-ep2"],
)
def test_biases_of_experts_that_several_ranks_share(
    layout: Layout, strategy: str, fused: bool, dispatcher: str
) -> None:
    """Each etp rank adds its share of the second bias; its gradient is whole on each."""
    config = MODELS["mixtral"](dispatcher=dispatcher).replace(add_bias_linear=True)
    options = Options(strategy=strategy, fused=fused, double=True)
    wanted = reference(config, False, options.dtype)
    assert wanted.gradients[0]["decoder.layers.1.mlp.experts.linear_fc2.bias1"].any()
    check(config, layout, options, wanted)


def test_prediction_and_a_tied_head_on_the_last_stage():
    """P06: the copy of the embedding that embeds for multi-token prediction and is the head stays the first stage's."""
    config = shapes.deepseek(dispatcher="alltoall", load_balancing=("seq_aux_loss",), aux_loss_coeff=(0.1,))
    config = config.replace(untie_embeddings_and_output_weights=False)
    options = Options(double=True)
    check(config, LAYOUTS["pp2-ep2"], options, reference(config, False, options.dtype))


def test_ranks_launch_in_one_order():
    """E16: dispatch, balancing losses and FSDP's own collectives, in the same order on all ranks of each group."""
    layout = Layout({"context": 2, "data": 2, "expert": 2})
    logs = run_ranks(
        recorded, 4, shapes.deepseek(dispatcher="alltoall"), layout, Options(recompute="full"), timeout=120
    )
    assert_one_order(logs)
