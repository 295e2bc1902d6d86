"""TE's tensor-parallel layers over 2 ranks, with and without sequence parallelism, against one rank."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.te.checks import assert_close, give_persistent_buffer, give_temporary_buffer
from tests.te.engine import device, load, run_te_ranks

IN, OUT, TOKENS, WORLD = 16, 24, 8, 2
LAYERS = [
    ("Linear", "column"),
    ("Linear", "row"),
    ("LayerNormLinear", "column"),
    ("LayerNormMLP", "column"),
]


def make(name: str, mode: str, sequence_parallel: bool) -> tuple[Any, dict[str, int]]:
    """A fused layer over the world, and the dim that each of its weights is cut along."""
    options = {
        "device": device(),
        "params_dtype": torch.float32,
        "tp_group": dist.group.WORLD,
        "tp_size": WORLD,
        "fuse_wgrad_accumulation": True,
        "sequence_parallel": sequence_parallel,
        "bias": False,
    }
    te = load()
    if name == "LayerNormMLP":
        layer = te.LayerNormMLP(IN, OUT, set_parallel_mode=True, **options)
        return layer, {"fc1_weight": 0, "fc2_weight": 1}
    layer = getattr(te, name)(IN, OUT, parallel_mode=mode, **options)
    return layer, {"weight": 1 if mode == "row" else 0}


def gathered(weight: Tensor, dim: int) -> Tensor:
    """The whole weight, as a leaf."""
    parts = [torch.empty_like(weight) for _ in range(WORLD)]
    dist.all_gather(parts, weight.detach().contiguous())
    return torch.cat(parts, dim).requires_grad_()


def reference(name: str, layer: Any, weights: dict[str, Tensor], x: Tensor) -> Tensor:
    """The layer on one rank, in torch."""
    if name == "Linear":
        return F.linear(x, weights["weight"])
    normed = F.layer_norm(x, (IN,), layer.layer_norm_weight, layer.layer_norm_bias, layer.eps)
    if name == "LayerNormLinear":
        return F.linear(normed, weights["weight"])
    hidden = F.gelu(F.linear(normed, weights["fc1_weight"]), approximate="tanh")
    return F.linear(hidden, weights["fc2_weight"])


def compare(
    rank: int, world_size: int, name: str, mode: str, sequence_parallel: bool, temporary: bool
) -> None:
    """One cell: output, input gradient and fused weight gradients of this rank."""
    torch.manual_seed(1)
    layer, cut = make(name, mode, sequence_parallel)
    weights = {key: gathered(getattr(layer, key), dim) for key, dim in cut.items()}
    for key in cut:
        (give_temporary_buffer if temporary else give_persistent_buffer)(getattr(layer, key))
    torch.manual_seed(2)
    whole = torch.randn(TOKENS, IN, device=device())
    leaf = whole.clone().requires_grad_()
    y_want = reference(name, layer, weights, leaf)
    dy = torch.randn_like(y_want)
    y_want.backward(dy)

    def tokens(t: Tensor) -> Tensor:
        return t.chunk(WORLD, 0)[rank] if sequence_parallel else t

    def features(t: Tensor) -> Tensor:
        return t.chunk(WORLD, -1)[rank]

    local_input = features if mode == "row" else tokens
    local_output = tokens if mode == "row" or name == "LayerNormMLP" else features
    x = local_input(whole).contiguous().requires_grad_()
    y = layer(x)
    y.backward(local_output(dy).contiguous())
    assert_close("y", y, local_output(y_want))
    assert_close("dx", x.grad, local_input(leaf.grad))
    for key, dim in cut.items():
        want = weights[key].grad.chunk(WORLD, dim)[rank] + (0.0 if temporary else 0.5)
        assert_close(key, getattr(layer, key).main_grad, want)


def compare_all(rank: int, world_size: int, sequence_parallel: bool) -> None:
    """Every layer, with both kinds of buffers."""
    for (name, mode), temporary in itertools.product(LAYERS, (True, False)):
        try:
            compare(rank, world_size, name, mode, sequence_parallel, temporary)
        except AssertionError as error:
            raise AssertionError(f"{name}, {mode}, temporary buffers {temporary}: {error}") from error


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
def test_layers_over_two_ranks(sequence_parallel: bool) -> None:
    run_te_ranks(compare_all, WORLD, sequence_parallel)
