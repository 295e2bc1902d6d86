"""TE's modules, run on this machine, against plain torch: outputs and all gradients, fused and not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.te.checks import assert_close, give_persistent_buffer, give_temporary_buffer
from tests.te.engine import device, in_te_process, load

SPLITS = [3, 0, 5]
DTYPES = {"float32": (torch.float32, 1e-5), "bfloat16": (torch.bfloat16, 2e-2)}
IN, OUT, ROWS = 16, 24, 8


@dataclass(frozen=True)
class Case:
    """A module, how to make it, which weights are fused, and its mathematics in float64."""

    make: Callable[[Any, dict[str, Any]], torch.nn.Module]
    weights: tuple[str, ...]
    reference: Callable[[Any, Tensor], Tensor]
    out_features: int = OUT
    extra: tuple[Any, ...] = ()


def _norm(module: Any, x: Tensor) -> Tensor:
    weight = module.layer_norm_weight.double()
    if module.normalization == "RMSNorm":
        return F.rms_norm(x, (x.shape[-1],), weight, module.eps)
    return F.layer_norm(x, (x.shape[-1],), weight, module.layer_norm_bias.double(), module.eps)


def _linear(module: Any, x: Tensor) -> Tensor:
    return F.linear(x, module.weight.double(), module.bias.double())


def _layer_norm_linear(module: Any, x: Tensor) -> Tensor:
    return _linear(module, _norm(module, x))


def _layer_norm_mlp(module: Any, x: Tensor) -> Tensor:
    hidden = F.linear(_norm(module, x), module.fc1_weight.double(), module.fc1_bias.double())
    if module.activation == "swiglu":
        gate, value = hidden.chunk(2, -1)
        hidden = F.silu(gate) * value
    else:
        hidden = F.gelu(hidden, approximate="tanh")
    return F.linear(hidden, module.fc2_weight.double(), module.fc2_bias.double())


def _grouped(module: Any, x: Tensor) -> Tensor:
    pieces = torch.split(x, SPLITS)
    outputs = (
        F.linear(piece, getattr(module, f"weight{i}").double(), getattr(module, f"bias{i}").double())
        for i, piece in enumerate(pieces)
    )
    return torch.cat(list(outputs))


MLP_WEIGHTS = ("fc1_weight", "fc2_weight")
CASES = {
    "Linear": Case(lambda te, o: te.Linear(IN, OUT, **o), ("weight",), _linear),
    "LayerNormLinear": Case(lambda te, o: te.LayerNormLinear(IN, OUT, **o), ("weight",), _layer_norm_linear),
    "LayerNormLinear-RMSNorm": Case(
        lambda te, o: te.LayerNormLinear(IN, OUT, normalization="RMSNorm", **o),
        ("weight",),
        _layer_norm_linear,
    ),
    "LayerNormMLP-gelu": Case(lambda te, o: te.LayerNormMLP(IN, 32, **o), MLP_WEIGHTS, _layer_norm_mlp, IN),
    "LayerNormMLP-swiglu": Case(
        lambda te, o: te.LayerNormMLP(IN, 32, activation="swiglu", **o), MLP_WEIGHTS, _layer_norm_mlp, IN
    ),
    "GroupedLinear": Case(
        lambda te, o: te.GroupedLinear(3, IN, OUT, **o),
        ("weight0", "weight1", "weight2"),
        _grouped,
        extra=(SPLITS,),
    ),
}


def _reference(case: Case, module: torch.nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Output, and gradients of the input and of every parameter by name order."""
    leaf = x.detach().double().requires_grad_(True)
    parameters = list(module.parameters())
    y = case.reference(module, leaf)
    gradients = torch.autograd.grad(y, [leaf, *parameters], dy.double(), allow_unused=True)
    zeros = [torch.zeros_like(t) for t in (leaf, *parameters)]
    return y, [zero if g is None else g for g, zero in zip(gradients, zeros, strict=True)]


@pytest.mark.parametrize("buffers", ["persistent", "temporary"])
@pytest.mark.parametrize("dtype_name", DTYPES)
@pytest.mark.parametrize("name", CASES)
@in_te_process
def test_module(name: str, dtype_name: str, buffers: str) -> None:
    """Persistent buffers accumulate; temporary ones, full of NaN, are overwritten in place."""
    case, (dtype, tolerance) = CASES[name], DTYPES[dtype_name]
    options = {"device": device(), "params_dtype": dtype, "fuse_wgrad_accumulation": True}
    module = case.make(load(), options)
    x = torch.randn(ROWS, IN, dtype=dtype, device=device(), requires_grad=True)
    dy = torch.randn(ROWS, case.out_features, dtype=dtype, device=device())
    y_want, (dx_want, *parameter_wants) = _reference(case, module, x, dy)
    give = give_persistent_buffer if buffers == "persistent" else give_temporary_buffer
    handed_out = {key: give(getattr(module, key)) for key in case.weights}
    for step in (1, 2):
        module.zero_grad()
        x.grad = None
        y = module(x, *case.extra)
        y.backward(dy)
        assert_close(f"y of step {step}", y, y_want, tolerance)
        assert_close(f"dx of step {step}", x.grad, dx_want, tolerance)
        for (key, parameter), want in zip(module.named_parameters(), parameter_wants, strict=True):
            if key not in case.weights:
                assert_close(f"{key}.grad of step {step}", parameter.grad, want, tolerance)
                continue
            total = want if buffers == "temporary" else want * step + 0.5
            assert_close(f"{key}.main_grad of step {step}", parameter.main_grad, total, tolerance)
            assert parameter.grad_added_to_main_grad
            assert parameter.grad is not None and parameter.grad.dtype == dtype  # the dummy
            if buffers == "temporary":
                assert parameter.main_grad is handed_out[key].buffer, "written in place"
                assert handed_out[key].calls == step, "fetched once per backward use, never in forward"


@pytest.mark.parametrize("dtype_name", DTYPES)
@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
@in_te_process
def test_norm(name: str, dtype_name: str) -> None:
    dtype, tolerance = DTYPES[dtype_name]
    module = getattr(load(), name)(IN, device=device(), dtype=dtype)
    x = torch.randn(5, IN, dtype=dtype, device=device(), requires_grad=True)
    dy = torch.randn_like(x)
    y = module(x)
    y.backward(dy)
    leaf, weight = x.detach().double().requires_grad_(), module.weight.detach().double().requires_grad_()
    if name == "RMSNorm":
        want = F.rms_norm(leaf, (IN,), weight, module.eps)
    else:
        want = F.layer_norm(leaf, (IN,), weight, module.bias.detach().double(), module.eps)
    want.backward(dy.double())
    assert_close("y", y, want, tolerance)
    assert_close("dx", x.grad, leaf.grad, tolerance)
    assert_close("dweight", module.weight.grad, weight.grad, tolerance)


@pytest.mark.parametrize("mask", ["causal", "no_mask"])
@pytest.mark.parametrize("dtype_name", DTYPES)
@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
@in_te_process
def test_attention(dtype_name: str, mask: str, layout: str) -> None:
    """Grouped queries: 4 heads on 2 groups."""
    dtype, tolerance = DTYPES[dtype_name][0], 3 * DTYPES[dtype_name][1]
    batch, sequence, heads, groups, size = 2, 6, 4, 2, 8
    module = load().DotProductAttention(
        heads, size, num_gqa_groups=groups, attn_mask_type=mask, qkv_format=layout, attention_dropout=0.0
    )
    order = (0, 1) if layout == "bshd" else (1, 0)

    def tensor(count: int) -> Tensor:
        value = torch.randn(batch, sequence, count, size, dtype=dtype, device=device())
        return value.permute(*order, 2, 3).contiguous().requires_grad_()

    q, k, v = tensor(heads), tensor(groups), tensor(groups)
    out = module(q, k, v)
    dy = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v), dy)
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
    by_head = [t.permute(*order, 2, 3).transpose(1, 2) for t in leaves]
    want = F.scaled_dot_product_attention(*by_head, is_causal=mask == "causal", enable_gqa=True)
    want = want.transpose(1, 2).flatten(2).permute(*order, 2)
    gradients = torch.autograd.grad(want, leaves, dy.double())
    assert_close("out", out, want, tolerance)
    for name, a, b in zip("qkv", got, gradients, strict=True):
        assert_close(f"d{name}", a, b, tolerance)


@in_te_process
def test_transformer_layer_writes_every_fused_weight() -> None:
    layer = load().TransformerLayer(
        32,
        64,
        4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        device=device(),
        params_dtype=torch.float32,
        fuse_wgrad_accumulation=True,
        fuse_qkv_params=True,
        normalization="RMSNorm",
        activation="swiglu",
    )
    matrices = [p for p in layer.parameters() if p.dim() == 2]
    for parameter in matrices:
        give_persistent_buffer(parameter, fill=0.0)
    x = torch.randn(6, 2, 32, device=device(), requires_grad=True)
    layer(x).sum().backward()
    assert len(matrices) == 4
    assert all(parameter.main_grad.abs().sum() > 0 for parameter in matrices)
