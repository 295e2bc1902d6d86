"""Recompute changes memory, never a bit: with dropout, in every granularity."""

from __future__ import annotations

import functools

import pytest
import torch

from megatron.models.attention import SelfAttention
from megatron.models.config import RecomputeConfig
from megatron.models.mlp import MLP
from megatron.parallel.recompute import DiscardedOutput
from tests.unit.models.helpers import build_gpt, random_batch, randomise, tiny_config
from tests.unit.models.moe.shapes import deepseek

CASES = {
    "uniform-1": RecomputeConfig("full", "uniform", 1),
    "uniform-2": RecomputeConfig("full", "uniform", 2),
    "uniform-7": RecomputeConfig("full", "uniform", 7),
    "block-2": RecomputeConfig("full", "block", 2),
    "block-9": RecomputeConfig("full", "block", 9),
    "core-attention": RecomputeConfig("selective"),
    "mlp": RecomputeConfig("selective", modules=("mlp",)),
    "both": RecomputeConfig("selective", modules=("core_attn", "mlp")),
}
PARTS = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")
EXPERTS = {
    "uniform-1": RecomputeConfig("full", "uniform", 1),
    **{part: RecomputeConfig("selective", modules=(part,)) for part in PARTS},
    "all": RecomputeConfig("selective", modules=PARTS),
    "all but moe": RecomputeConfig("selective", modules=tuple(part for part in PARTS if part != "moe")),
}


class KeptElements(torch.autograd.graph.saved_tensors_hooks):
    """Counts the elements that autograd keeps for backward."""

    def __init__(self):
        self.total = 0
        super().__init__(self._pack, lambda x: x)

    def _pack(self, x):
        self.total += x.numel()
        return x

    def __enter__(self):
        super().__enter__()
        return self


def run(config, calls=None, saved=None):
    """Losses and gradients of two steps, dropout drawn from a fixed seed."""
    model = randomise(build_gpt(config))
    if calls is not None:
        for name, module in model.named_modules():
            if isinstance(module, (SelfAttention, MLP)):
                module.register_forward_pre_hook(lambda module, args, name=name: calls.append(name))
    tokens, labels = random_batch(config)
    torch.manual_seed(99)
    results = []
    for _ in range(2):
        with KeptElements() as kept:
            losses = model(tokens, labels=labels)
        losses.sum().backward()
        results.append(losses.detach())
        if saved is not None:
            saved.append(kept.total)
    return [*results, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("dropout", [0.0, 0.2], ids=["plain", "dropout"])
@pytest.mark.parametrize("recompute", CASES.values(), ids=CASES.keys())
def test_recompute_gives_the_same_bits(recompute, dropout):
    """F01's oracle side: losses and gradients equal those without it bit for bit, in a second step too."""
    config = tiny_config(num_layers=5, attention_dropout=dropout, hidden_dropout=dropout)
    expected = run(config)
    got = run(config.replace(recompute=recompute))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


class KeptStorages(KeptElements):
    """Counts bytes in the storages of what autograd keeps, once forward is over: those thrown away have none left."""

    def _pack(self, x):
        super()._pack(x)
        self.tensors.append(x)
        return x

    def __enter__(self):
        self.tensors = []
        return super().__enter__()

    def num_bytes(self):
        storages = {x.untyped_storage()._cdata: x.untyped_storage() for x in self.tensors}
        return sum(storage.nbytes() for storage in storages.values())


def run_experts(recompute):
    """Losses, gradients and bytes kept of two steps of latent attention, experts, a shared one and a further token."""
    config = deepseek(dispatcher="alltoall", load_balancing=("aux_loss",), aux_loss_coeff=(0.1,))
    model = randomise(build_gpt(config.replace(hidden_dropout=0.1, recompute=recompute)))
    tokens, labels = random_batch(config, length=24)
    torch.manual_seed(99)
    results = []
    for _ in range(2):
        with KeptStorages() as kept:
            losses = model(tokens, labels=labels)
        num_bytes = kept.num_bytes()
        losses.sum().backward()
        results.append(losses.detach())
    return [*results, *(parameter.grad for parameter in model.parameters())], num_bytes


@functools.cache
def plain_experts():
    return run_experts(RecomputeConfig())


@pytest.mark.parametrize("name", EXPERTS)
def test_every_part_can_be_recomputed(name):
    """The same bits from less memory: each of Megatron's names, multi-token prediction too."""
    expected, plain = plain_experts()
    got, num_bytes = run_experts(EXPERTS[name])
    for a, b in zip(got, expected, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    assert num_bytes < plain


@pytest.mark.parametrize("part", ["layernorm", "mla_up_proj", "moe", "moe_act", "shared_experts"])
def test_parts_that_a_model_lacks_are_refused(part):
    with pytest.raises(ValueError, match=f"--recompute-modules {part}: in this model .*; drop {part}"):
        tiny_config(recompute=EXPERTS[part])


def test_a_discarded_output_is_refilled_for_its_users():
    """A view and two users of one output, parameters inside, a second call before the first's backward."""
    torch.manual_seed(3)
    inner, weight = torch.nn.Linear(4, 6), torch.randn(6, 5, requires_grad=True)

    def run(discard):
        inner.zero_grad()
        weight.grad = None
        inputs = [torch.arange(8.0).view(2, 4).add(k).requires_grad_() for k in range(2)]
        results, storages = [], []
        for x in inputs:
            kept = DiscardedOutput()
            y = kept.call(inner, x) if discard else inner(x)
            out = (y.view(1, 2, 6) @ weight).square().sum() + y.exp().mean()
            storages.append(y.untyped_storage())
            if discard:
                kept.discard(out)
            results.append(out)
        sizes = [storage.nbytes() for storage in storages]
        sum(results).backward()
        return sizes, [*results, *(x.grad for x in inputs), weight.grad, inner.weight.grad, inner.bias.grad]

    (sizes, ours), (_, expected) = run(True), run(False)
    assert sizes == [0, 0]
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    with torch.no_grad():
        kept = DiscardedOutput()
        y = kept.call(inner, torch.ones(2, 4))
        kept.discard(y * 2)
        assert torch.equal(y, inner(torch.ones(2, 4)))


def test_dropout_does_something():
    config = tiny_config(attention_dropout=0.2)
    assert not torch.equal(run(config)[0], run(tiny_config())[0])
    hidden = run(tiny_config(hidden_dropout=0.2))
    assert not torch.equal(hidden[0], run(tiny_config())[0]) and not torch.equal(hidden[0], hidden[1])


@pytest.mark.parametrize(
    ("name", "attention_runs", "mlp_runs"),
    [
        ("uniform-2", 2, 2),
        ("block-2", (2, 2, 1, 1, 1), (2, 2, 1, 1, 1)),
        ("core-attention", 1, 1),
        ("mlp", 1, 2),
    ],
)
def test_what_runs_again_is_what_was_asked_for(name, attention_runs, mlp_runs):
    calls: list[str] = []
    run(tiny_config(num_layers=5, recompute=CASES[name]), calls)
    for part, runs in (("self_attention", attention_runs), ("mlp", mlp_runs)):
        for layer in range(5):
            expected = 2 * (runs if isinstance(runs, int) else runs[layer])
            assert calls.count(f"decoder.layers.{layer}.{part}") == expected


def test_recompute_keeps_less():
    config = tiny_config(num_layers=5)
    kept = {}
    for name, recompute in {"none": RecomputeConfig(), **CASES}.items():
        saved: list[int] = []
        run(config.replace(recompute=recompute), saved=saved)
        kept[name] = saved[0]
    assert kept["uniform-2"] < kept["uniform-1"] < kept["block-2"] < kept["none"]
    assert kept["both"] < kept["mlp"] < kept["none"]
    assert kept["uniform-7"] < 0.4 * kept["none"]


def test_nothing_is_recomputed_without_gradients():
    calls: list[str] = []
    config = tiny_config(recompute=CASES["uniform-1"], hidden_dropout=0.1)
    model = build_gpt(config).eval()
    for module in model.modules():
        if isinstance(module, MLP):
            module.register_forward_pre_hook(lambda module, args: calls.append("mlp"))
    tokens, _ = random_batch(config)
    with torch.no_grad():
        assert torch.equal(model(tokens), model(tokens))
    assert len(calls) == 2 * config.num_layers
