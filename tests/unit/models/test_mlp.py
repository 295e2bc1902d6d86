"""Activations against their definitions."""

from __future__ import annotations

import pytest
import torch

from megatron.models.config import ACTIVATIONS
from megatron.models.mlp import activation_function
from tests.unit.models.helpers import relative_error, tiny_config
from tests.unit.models.naive_gpt import activation


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("clamp", [None, 0.7])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_activations_are_their_definitions(name, gated, clamp, offset):
    """Values and gradients, in float64. A clamp and an offset belong to gated ones."""
    config = tiny_config(
        activation=name, gated_linear_unit=gated, activation_func_clamp_value=clamp, glu_linear_offset=offset
    )
    x = torch.randn(3, 2, 16, dtype=torch.float64, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    ours, theirs = activation_function(config)(x), activation(y, config)
    assert relative_error(ours, theirs) < 1e-14
    weight = torch.randn_like(ours)
    (ours * weight).sum().backward()
    (theirs * weight).sum().backward()
    assert relative_error(x.grad, y.grad) < 1e-14
    assert ours.shape[-1] == (8 if gated else 16)
