"""The router against the definitions: choices, weights, losses and their gradients, bias, capacity, jitter."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.models.auxiliary import AuxiliaryLayer, AuxiliaryLosses
from megatron.models.backends.base import LayerOptions
from megatron.models.backends.torch import TorchBackend
from megatron.models.block import LayerContext
from megatron.models.init import Initializer, materialise
from megatron.models.moe import balance, scores
from megatron.models.moe.config import MoEConfig
from megatron.models.moe.layer import MoELayer
from megatron.models.moe.router import TopKRouter
from megatron.parallel.mesh import ParallelMesh
from tests.unit.models.moe import shapes

SIGMOID = {"score_function": "sigmoid", "enable_expert_bias": True}


def build(kind: type = TopKRouter, **changes: Any) -> tuple[Any, AuxiliaryLosses]:
    """A router, or a layer, of 4 experts, and what it reports to."""
    config = shapes.mixtral(
        **{"load_balancing": ("none",), "aux_loss_coeff": (0.0,), "z_loss_coeff": None, **changes}
    )
    assert config.moe is not None
    auxiliary = AuxiliaryLosses((AuxiliaryLayer("layer_1", config.moe.loss_names, config.moe.num_experts),))
    backend = TorchBackend(LayerOptions(device="meta"))
    context = LayerContext(config, backend, ParallelMesh.single(), 2, auxiliary)
    made = kind(context, config.moe) if kind is TopKRouter else kind(context)
    return materialise(made, Initializer(3, ParallelMesh.single())), auxiliary


def hidden_states(length: int = 5, batch: int = 2, seed: int = 0) -> torch.Tensor:
    return torch.randn(length, batch, 16, generator=torch.Generator().manual_seed(seed))


def moe(**changes: Any) -> MoEConfig:
    return MoEConfig(**{"num_experts": 8, "ffn_hidden_size": 4, "pattern": (True,), **changes})


def naive_choice(logits: list[float], config: MoEConfig, bias: list[float]) -> tuple[list[int], list[float]]:
    """One token, from the definitions."""
    row = torch.tensor(logits, dtype=torch.float64)
    soft = config.score_function == "softmax"
    values = row.softmax(0) if soft else row.sigmoid()
    if config.score_function == "sqrtsoftplus":
        values = (1 + row.exp()).log() ** 0.5
    ranked = values + torch.tensor(bias, dtype=torch.float64)
    allowed = list(range(len(logits)))
    if config.num_groups:
        size, best = len(logits) // config.num_groups, config.topk // config.group_topk
        groups = sorted(
            range(config.num_groups),
            key=lambda g: -sum(sorted(ranked[g * size : (g + 1) * size].tolist(), reverse=True)[:best]),
        )[: config.group_topk]
        allowed = [e for e in allowed if e // size in groups]
    chosen = sorted(allowed, key=lambda e: -float(ranked[e]))[: config.topk]
    weights = [float(values[e]) for e in chosen]
    if (soft and not config.pre_softmax) or (not soft and config.topk > 1):
        weights = [w / sum(weights) for w in weights]
    return chosen, [w * (config.topk_scaling_factor or 1.0) for w in weights]


VARIANTS: list[dict[str, Any]] = [
    {"topk": 2},
    {"topk": 3, "pre_softmax": True},
    {"topk": 1, "pre_softmax": True, "topk_scaling_factor": 2.0},
    {"topk": 2, "score_function": "sigmoid"},
    {"topk": 1, "score_function": "sigmoid"},
    {"topk": 3, "score_function": "sqrtsoftplus", "enable_expert_bias": True},
    {"topk": 4, "num_groups": 4, "group_topk": 2, "topk_scaling_factor": 2.5, **SIGMOID},
    {"topk": 2, "num_groups": 2, "group_topk": 1, "pre_softmax": True},
]


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_choice_and_weights(changes, seed):
    """A bias moves the choice and never the weights."""
    config = moe(**changes)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, 8, generator=generator, dtype=torch.float64)
    bias = torch.randn(8, generator=generator, dtype=torch.float64) * (
        0.3 if config.enable_expert_bias else 0.0
    )
    experts, weights = scores.choose_experts(logits, config, bias if config.enable_expert_bias else None)
    for t in range(6):
        chosen, expected = naive_choice(logits[t].tolist(), config, bias.tolist())
        assert experts[t].tolist() == chosen
        assert weights[t].tolist() == pytest.approx(expected, rel=1e-12)


def test_forced_routes():
    """Random logits spread tokens that all want one expert, and keep the gradient; a bias does the reverse."""
    hidden = hidden_states(100, 4)
    router, _ = build(topk=1, pre_softmax=True, force_load_balancing=True)
    with torch.no_grad():
        router.weight.zero_()[0] = 100.0
    routing = router(hidden)
    assert torch.bincount(routing.experts.flatten(), minlength=4).min() > 60
    routing.weights.sum().backward()
    assert router.weight.grad.norm() > 0
    for std, changes in ((50.0, True), (-50.0, False)):
        router, _ = build(topk=1, pre_softmax=True, force_biased=std)
        torch.manual_seed(0)
        seen = {tuple(router(hidden).experts.flatten().unique().tolist()) for _ in range(12)}
        assert all(len(experts) == 1 for experts in seen) and (len(seen) > 1) is changes


def test_sinkhorn_spreads_tokens():
    """Logits that send everybody to one expert; in evaluation the best one is taken."""
    config = moe(topk=1, load_balancing=("sinkhorn",))
    logits = torch.rand(64, 8, generator=torch.Generator().manual_seed(1))
    logits[:, 0] += 2.0
    experts, weights = scores.choose_by_sinkhorn(logits, config, training=True)
    assert torch.bincount(experts.flatten(), minlength=8).max() <= 16
    assert torch.equal(weights, logits.sigmoid().gather(1, experts))
    experts, _ = scores.choose_by_sinkhorn(logits, config, training=False)
    assert torch.bincount(experts.flatten(), minlength=8)[0] == 64


def naive_balance(probabilities: torch.Tensor, chosen: torch.Tensor, topk: int) -> torch.Tensor:
    """E sum f P of [tokens, experts] and [tokens, k]."""
    tokens, experts = probabilities.shape
    total = torch.zeros((), dtype=probabilities.dtype)
    for e in range(experts):
        fraction = sum(int(e in row) for row in chosen.tolist()) / (tokens * topk)
        total = total + fraction * probabilities[:, e].mean()
    return total * experts


@pytest.mark.parametrize(
    ("kind", "score_function"),
    [
        ("aux_loss", "softmax"),
        ("aux_loss", "sigmoid"),
        ("seq_aux_loss", "softmax"),
        ("global_aux_loss", "softmax"),
    ],
)
def test_losses_and_gradients_are_those_of_the_definition(kind, score_function):
    """E03: without its weight a loss changes nothing, with it the router's gradient by exactly its own gradient.

    Two microbatches: the step's loss looks at both in the second one (E04).
    """
    router, auxiliary = build(load_balancing=(kind,), aux_loss_coeff=(0.7,), score_function=score_function)
    plain, _ = build(score_function=score_function)
    plain.load_state_dict(router.state_dict())
    auxiliary.scale = 0.25
    inputs = [hidden_states(5, 2, seed) for seed in (0, 1)]
    for hidden in inputs:
        router(hidden).weights.square().sum().backward()
        plain(hidden).weights.square().sum().backward()
    expected, found, seen = torch.zeros(()), torch.zeros(()), []
    weight = plain.weight.detach().clone().requires_grad_()
    for hidden in inputs:
        logits = hidden.flatten(0, 1) @ weight.t()
        values = logits.softmax(-1) if score_function == "softmax" else logits.sigmoid()
        values = values / values.sum(-1, keepdim=True)
        chosen = values.topk(2).indices
        seen.append((values.detach(), chosen))
        if kind == "seq_aux_loss":
            parts = [naive_balance(values[b::2], chosen[b::2], 2) for b in range(2)]
            value = torch.stack(parts).mean()
        elif kind == "global_aux_loss":
            everything = torch.cat([item[1] for item in seen])
            fractions = torch.bincount(everything.flatten(), minlength=4) / everything.numel()
            value = 4 * (fractions * values.mean(0)).sum()
        else:
            value = naive_balance(values, chosen, 2)
        expected, found = expected + value, found + value.detach()
    expected.backward()
    difference = router.weight.grad - plain.weight.grad
    assert torch.allclose(difference, 0.7 * 0.25 * weight.grad, atol=1e-6)
    assert difference.norm() > 1e-4
    report = auxiliary.report(auxiliary.vector(), 2)
    (logged,) = report.losses["layer_1"].values()
    assert logged == pytest.approx(float(found) / 2, rel=1e-6)
    assert report.loads["layer_1"].sum() == 2 * 10 * 2


def test_fractions_of_unequal_microbatches_sum_to_topk():
    """E04: 4 and 12 tokens; what the step's loss sees are shares of all 16."""
    router, _ = build(load_balancing=("global_aux_loss",), aux_loss_coeff=(1.0,))
    for length in (2, 6):
        router(hidden_states(length)).weights.sum().backward()
    counts, tokens = router._so_far._given[-1]
    assert tokens == 16 and int(counts.sum()) == 16 * 2
    router._auxiliary.end_step(None)
    assert router._so_far._counts is None


def test_z_loss():
    router, auxiliary = build(z_loss_coeff=0.1)
    hidden = hidden_states()
    logits = hidden.flatten(0, 1) @ router.weight.t()
    (expected,) = torch.autograd.grad(0.1 * logits.logsumexp(-1).square().mean(), router.weight)
    router(hidden).weights.sum().backward()
    plain, _ = build()
    plain(hidden).weights.sum().backward()
    assert torch.allclose(router.weight.grad - plain.weight.grad, expected, atol=1e-6)
    assert auxiliary.report(auxiliary.vector(), 1).losses["layer_1"]["z_loss"] == pytest.approx(
        logits.logsumexp(-1).square().mean().item(), rel=1e-6
    )


def test_bias_moves_towards_idle_experts_and_counts_exactly():
    """E06: 64 counts summing to 40840 are compared in integers."""
    counts = torch.full((64,), 638, dtype=torch.int64)
    counts[0] += 40840 - 64 * 638
    moved = balance.moved_bias(torch.zeros(64), counts, 1e-3)
    mean = 40840 / 64
    assert moved.tolist() == pytest.approx([1e-3 if c < mean else -1e-3 for c in counts.tolist()])
    even = balance.moved_bias(torch.ones(4), torch.tensor([2**40 + 1] * 4), 1e-3)
    assert torch.equal(even, torch.ones(4))


def test_bias_stays_fp32_bit_for_bit():
    """E06: whatever the model is cast to; and through a state dict."""
    router, _ = build(**SIGMOID)
    router.expert_bias.copy_(torch.tensor([0.5001, -0.1003, 0.2, 1e-3]))
    before = router.expert_bias.clone()
    for cast in (router.bfloat16, router.half, router.double, lambda: router.to(torch.bfloat16)):
        cast()
        assert router.expert_bias.dtype == torch.float32 and torch.equal(router.expert_bias, before)
    other, _ = build(**SIGMOID)
    other.load_state_dict(router.state_dict())
    assert torch.equal(other.expert_bias, before)


def test_only_training_counts_and_recompute_counts_once():
    """E07, E10: neither an evaluation nor a forward without backward nor a repeated forward is counted."""
    layer, auxiliary = build(
        MoELayer, load_balancing=("aux_loss", "global_aux_loss"), aux_loss_coeff=(0.1, 0.1)
    )
    hidden = hidden_states()
    layer.eval()
    layer(hidden)
    layer.train()
    with torch.no_grad():
        layer(hidden)
    assert not auxiliary.vector().any()
    layer(hidden.clone().requires_grad_()).sum().backward()
    once = auxiliary.vector()
    grads = [parameter.grad.clone() for parameter in layer.parameters()]
    assert once[-4:].sum() == 10 * 2
    auxiliary.end_step(None)
    layer.zero_grad()
    again = TorchBackend(LayerOptions()).checkpoint(layer, hidden.clone().requires_grad_())
    again.sum().backward()
    assert torch.equal(auxiliary.vector(), once)
    for parameter, grad in zip(layer.parameters(), grads, strict=True):
        assert torch.equal(parameter.grad, grad)


def test_a_skipped_step_leaves_the_bias():
    router, auxiliary = build(**SIGMOID)
    for updated in (False, True):
        router(hidden_states()).weights.sum().backward()
        report = auxiliary.report(auxiliary.vector(), 1)
        auxiliary.end_step(report if updated else None)
        assert bool(router.expert_bias.any()) is updated
        assert not auxiliary.vector().any()


def test_router_dtype():
    """E12: scores in fp32 from 16-bit hidden states, and the product too if asked for."""
    router, _ = build(router_dtype="fp32")
    router.bfloat16()
    hidden = hidden_states().bfloat16()
    routing = router(hidden)
    assert routing.weights.dtype == torch.float32
    logits = hidden.float().flatten(0, 1) @ router.weight.float().t()
    assert torch.equal(routing.weights, logits.gather(1, routing.experts).softmax(-1))


@pytest.mark.parametrize("pad", [False, True])
def test_capacity_of_a_layer(pad):
    """All tokens of a batch want the same experts: those over capacity give nothing of it."""
    changes = {"expert_capacity_factor": 0.5, "pad_expert_input_to_capacity": pad, "dispatcher": "alltoall"}
    layer, _ = build(MoELayer, **changes)
    routing = layer.router(hidden_states())
    kept = routing.experts < 4
    assert torch.bincount(routing.experts[kept], minlength=4).max() <= 3  # ceil(10 * 2 / 4 * 0.5)
    assert routing.capacity == (3 if pad else None)
    other, _ = build(
        MoELayer, **{**changes, "pad_expert_input_to_capacity": False, "dispatcher": "allgather"}
    )
    other.load_state_dict(layer.state_dict())
    assert torch.allclose(layer(hidden_states()), other(hidden_states()), atol=1e-6)


def test_jitter_is_of_training_only_and_replayed():
    router, _ = build(input_jitter_eps=0.5)
    hidden = hidden_states()
    assert not torch.equal(router(hidden).weights, router(hidden).weights)
    router.eval()
    assert torch.equal(router(hidden).weights, router(hidden).weights)


def test_weight_on_the_input_of_a_linear_expert_is_the_same():
    """With one expert a token and the identity between its layers, w f(x) = f(w x)."""
    layer, _ = build(MoELayer, topk=1, pre_softmax=True, apply_probs_on_input=True)
    other, _ = build(MoELayer, topk=1, pre_softmax=True)
    other.load_state_dict(layer.state_dict())
    for each in (layer, other):
        each.experts._activation = lambda x: x.chunk(2, -1)[0]
    assert torch.allclose(layer(hidden_states()), other(hidden_states()), atol=1e-6)


def test_every_loss_of_the_configuration_is_reported():
    config = moe(load_balancing=("aux_loss", "seq_aux_loss"), aux_loss_coeff=(0.1, 0.0), z_loss_coeff=0.1)
    assert config.loss_names == ("load_balancing_loss", "z_loss")
    assert dataclasses.replace(config, z_loss_coeff=None).loss_names == ("load_balancing_loss",)
