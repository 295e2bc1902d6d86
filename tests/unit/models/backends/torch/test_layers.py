"""Grouped layers, the MLP, the embedding, parameters and the backend itself, on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.models.backends.base import Backend, LayerOptions
from megatron.models.backends.torch import (
    GroupedLinear,
    LayerNormMLP,
    Linear,
    TorchBackend,
    VocabParallelEmbedding,
)
from megatron.models.backends.torch.grouped import naive_grouped_linear
from megatron.models.backends.torch.mlp import ACTIVATIONS
from megatron.parallel.annotate import ParameterAnnotation, annotation_of
from tests.unit.parallel.sharding import relative_error


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("splits", [[3, 0, 4], [0, 0, 7], [7, 0, 0], [0, 0, 0]])
def test_grouped_linear_equals_the_naive_one(splits: list[int], bias: bool) -> None:
    """E08: all tokens to one expert, none to any: idle experts get zero gradients, not None."""
    torch.manual_seed(0)
    layer = GroupedLinear(3, 5, 4, bias=bias)
    x = torch.randn(sum(splits), 5, requires_grad=True)
    upstream = torch.randn(sum(splits), 4)
    out = layer(x, torch.tensor(splits))
    parameters = list(layer.parameters())
    got = torch.autograd.grad(out, [x, *parameters], upstream)
    expected = naive_grouped_linear(x, splits, layer.gemm_weights(), layer.biases() if bias else None)
    want = torch.autograd.grad(expected, [x, *parameters], upstream)
    torch.testing.assert_close(out, expected)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_grouped_linear_refuses_splits_that_do_not_fit() -> None:
    layer = GroupedLinear(2, 5, 4)
    for splits in ([3], [2, 2]):
        with pytest.raises(ValueError, match="m_splits"):
            layer(torch.ones(3, 5), splits)
    with pytest.raises(ValueError, match="row-parallel bias would be added on each of 2"):
        GroupedLinear(2, 4, 4, parallel_mode="row", expert_tp_size=2)


def test_expert_cuts_carry_their_axis() -> None:
    options = LayerOptions(expert_tp_size=2)
    column = GroupedLinear(
        2, 4, 12, bias=False, parallel_mode="column", tensor_parallel_parts=2, options=options
    )
    row = GroupedLinear(2, 6, 4, bias=False, parallel_mode="row", options=options)
    assert column.weight1.shape == (6, 4) and row.weight0.shape == (4, 3)
    assert annotation_of(column.weight1) == ParameterAnnotation(0, 2, expert=True)
    assert annotation_of(row.weight0) == ParameterAnnotation(1, expert=True)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_mlp_equals_its_parts(activation: str) -> None:
    torch.manual_seed(0)
    layer = LayerNormMLP(6, 8, activation=activation)
    x = torch.randn(4, 2, 6)
    normed = torch.nn.functional.layer_norm(x, (6,), layer.layer_norm_weight, layer.layer_norm_bias)
    inner = normed @ layer.fc1_weight.t() + layer.fc1_bias
    function, gated = ACTIVATIONS[activation]
    assert inner.shape[-1] == (16 if gated else 8)
    inner = function(inner[..., :8]) * inner[..., 8:] if gated else function(inner)
    torch.testing.assert_close(layer(x), inner @ layer.fc2_weight.t() + layer.fc2_bias)


def test_mlp_activation_is_named() -> None:
    with pytest.raises(ValueError, match="activation='tanh': choose one of gelu"):
        LayerNormMLP(4, 4, activation="tanh")


def test_return_bias_leaves_it_out() -> None:
    layer = Linear(4, 3, return_bias=True)
    torch.nn.init.ones_(layer.bias)
    out, bias = layer(torch.ones(2, 4))
    torch.testing.assert_close(
        out + bias, torch.nn.functional.linear(torch.ones(2, 4), layer.weight, layer.bias)
    )
    assert Linear(4, 3, bias=False, return_bias=True)(torch.ones(2, 4))[1] is None


def test_embedding_is_sequence_first_and_its_padding_zero() -> None:
    layer = VocabParallelEmbedding(5, 3, num_padded_embeddings=8)
    tokens = torch.tensor([[0, 4, 2]])
    out = layer(tokens)
    assert out.shape == (3, 1, 3) and torch.equal(out[1, 0], layer.weight[4])
    assert layer.weight[5:].eq(0).all() and annotation_of(layer.weight).num_global_rows == 5
    with pytest.raises(ValueError, match="num_padded_embeddings=4"):
        VocabParallelEmbedding(5, 3, num_padded_embeddings=4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"parallel_mode": "diagonal"}, "qkv: parallel_mode='diagonal'"),
        ({"parallel_mode": "column", "tensor_parallel_parts": 2}, "qkv: out_features=6 does not divide"),
        ({"parallel_mode": "row"}, "qkv: in_features=5 does not divide by the tensor-parallel size 4"),
    ],
)
def test_sizes_that_do_not_divide_are_named(arguments: dict[str, Any], words: str) -> None:
    options = LayerOptions(tp_size=4, tp_group=torch.distributed.ProcessGroup(0, 4))
    with pytest.raises(ValueError, match=words):
        Linear(5, 6, name="qkv", options=options, **arguments)


def test_options_need_a_group() -> None:
    with pytest.raises(ValueError, match="tp_size=2 needs a tp_group"):
        LayerOptions(tp_size=2)


def test_parameters_on_meta_allocate_nothing_and_say_how_they_start() -> None:
    backend = TorchBackend(LayerOptions(device="meta", params_dtype=torch.bfloat16))
    layers = [backend.LayerNormLinear(4, 6, init_std=0.5), backend.GroupedLinear(2, 4, 6)]
    for layer in (*layers, backend.LayerNormMLP(4, 8)):
        for name, parameter in layer.named_parameters():
            assert parameter.is_meta and parameter.dtype == torch.bfloat16
            kind = "ones" if name == "layer_norm_weight" else "zeros" if "bias" in name else "normal"
            assert parameter.init_spec.kind == kind, name
    assert layers[0].weight.init_spec.std == 0.5


def test_backend_protocol() -> None:
    backend: Backend = TorchBackend(LayerOptions(delay_wgrad_compute=True))
    assert backend.needs_backward_dw(backend.Linear(2, 2)) and not backend.needs_backward_dw(
        backend.RMSNorm(2)
    )
    assert backend.fused_adam() is None and backend.rng_tracker() is None
    with backend.autocast(None):
        pass
    with pytest.raises(ValueError, match="--transformer-impl transformer_engine"):
        backend.autocast("delayed")
    x = torch.ones(2, 2, requires_grad=True)
    out = backend.checkpoint(torch.sin, x)
    out.sum().backward()
    assert relative_error(x.grad, torch.cos(x)) < 1e-6


def test_head_gives_logits_or_losses() -> None:
    head = TorchBackend(LayerOptions()).VocabParallelHead(4, 8)
    hidden, labels = torch.randn(3, 2, 4), torch.randint(8, (3, 2))
    logits = head(hidden)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    torch.testing.assert_close(head(hidden, labels).flatten(), expected)
