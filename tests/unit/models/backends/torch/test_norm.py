"""Norms of the torch backend against their formulas in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.models.backends.base import LayerOptions
from megatron.models.backends.torch import LayerNorm, LayerNormLinear, RMSNorm
from megatron.models.backends.torch.norm import rms_norm
from tests.unit.parallel.sharding import relative_error


def _formula(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    if bias is not None:
        x = x - x.mean(-1, keepdim=True)
    scale = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return x * scale * weight + (0 if bias is None else bias)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-13), (torch.bfloat16, 1e-2)]
)
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_equals_the_formula(kind: type, zero_centered: bool, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    layer = kind(24, eps=1e-3, zero_centered_gamma=zero_centered, params_dtype=dtype)
    start = layer.weight.detach().clone()
    assert start.eq(0.0 if zero_centered else 1.0).all()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn(24))
    x = torch.randn(5, 3, 24).to(dtype).requires_grad_()
    upstream = torch.randn(5, 3, 24).to(dtype)
    out = layer(x)
    assert out.dtype == dtype
    (out * upstream).sum().backward()
    exact = [t.detach().double().requires_grad_() for t in (x, *layer.parameters())]
    gamma = exact[1] + 1 if zero_centered else exact[1]
    expected = _formula(exact[0], gamma, exact[2] if len(exact) > 2 else None, 1e-3)
    (expected * upstream.double()).sum().backward()
    assert relative_error(out, expected) < tolerance
    for got, want in zip((x, *layer.parameters()), exact, strict=True):
        assert relative_error(got.grad, want.grad) < tolerance


def test_rms_norm_passes_gradcheck_and_skips_what_is_not_needed() -> None:
    x = torch.randn(3, 2, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: rms_norm(a, b, 1e-4), (x, weight))
    assert torch.autograd.gradcheck(lambda a: rms_norm(a, weight.detach(), 1e-4), (x,))
    assert torch.autograd.gradcheck(lambda b: rms_norm(x.detach(), b, 1e-4), (weight,))


def test_views_and_zero_rows() -> None:
    """Heads that are a view of a projection; rows of zeros; no rows."""
    layer = RMSNorm(4)
    mixed = torch.randn(3, 2, 12)
    heads = mixed.view(3, 2, 3, 4)[:, :, 1:]
    torch.testing.assert_close(layer(heads), layer(heads.contiguous()))
    assert layer(torch.zeros(2, 4)).eq(0).all()
    assert layer(torch.zeros(0, 4)).shape == (0, 4)


def test_returned_norm_output_is_the_normalised_input() -> None:
    layer = LayerNormLinear(8, 6, normalization="RMSNorm", return_layernorm_output=True, return_bias=True)
    x = torch.randn(2, 8)
    out, bias, normed = layer(x)
    torch.testing.assert_close(normed, torch.nn.functional.rms_norm(x, (8,), layer.layer_norm_weight, 1e-5))
    torch.testing.assert_close(out, normed @ layer.weight.t())
    assert bias is layer.bias


def test_annotations_say_when_gradients_are_partial() -> None:
    group = torch.distributed.ProcessGroup(0, 2)
    cases = [(False, False, "none"), (False, True, "sum"), (True, False, "sum")]
    for sequence_parallel, tensor_partial, expected in cases:
        options = LayerOptions(tp_group=group, tp_size=2, sequence_parallel=sequence_parallel)
        layer = RMSNorm(4, tensor_partial=tensor_partial, options=options)
        assert layer.weight.parallel_annotation.replicated_gradient == expected


def test_unknown_normalization_is_named() -> None:
    with pytest.raises(ValueError, match="normalization='BatchNorm': choose one of LayerNorm, RMSNorm"):
        LayerNormLinear(4, 4, normalization="BatchNorm")
    with pytest.raises(ValueError, match="parallel_mode='row'"):
        LayerNormLinear(4, 4, parallel_mode="row")
