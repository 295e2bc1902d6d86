"""Vocabulary-parallel cross-entropy against the naive one."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from megatron.parallel import loss as loss_module
from megatron.parallel.loss import linear_cross_entropy, naive_cross_entropy, vocab_parallel_cross_entropy
from megatron.parallel.mesh import ParallelMesh, ParallelSizes
from megatron.parallel.tensor import LinearPlan
from tests.pool import run_ranks
from tests.unit.parallel.sharding import relative_error


def two_ranks_of_four_logits(rank: int, world_size: int) -> Tensor:
    """Logits 0, 1, 2, 3 cut over two ranks, label 3."""
    group = ParallelMesh(ParallelSizes(tensor=world_size)).group("tp")
    logits = torch.arange(4.0).chunk(world_size)[rank][None].requires_grad_()
    value = vocab_parallel_cross_entropy(logits, torch.tensor([3]), group)
    value.sum().backward()
    return torch.cat([value.detach(), logits.grad[0]])


def test_four_logits_on_two_ranks() -> None:
    """P15: the loss is 0.44019 on both ranks; the label's gradient is softmax - 1."""
    first, second = run_ranks(two_ranks_of_four_logits, 2)
    softmax = torch.arange(4.0).softmax(0)
    assert float(first[0]) == float(second[0]) == pytest.approx(0.44019, abs=1e-5)
    expected = softmax - torch.tensor([0.0, 0, 0, 1])
    torch.testing.assert_close(torch.cat([first[1:], second[1:]]), expected)


WORDS, PADDED, HIDDEN, SHAPE = 13, 24, 8, (8, 2)


def _data(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden [s, b, h], head weight [padded, h] with garbage in its padding rows, labels, upstream gradient."""
    torch.manual_seed(5)
    hidden, weight = torch.randn(*SHAPE, HIDDEN).to(dtype), torch.randn(PADDED, HIDDEN).to(dtype)
    labels = torch.randint(WORDS, SHAPE)
    labels[0, 0], labels[1, 0] = 0, WORDS - 1
    return hidden, weight, labels, torch.rand(SHAPE) - 0.3


def loss_cells(rank: int, world_size: int) -> dict[str, Any]:
    """Both losses, in chunks of few rows and at once, padding on ranks that hold nothing else."""
    group = ParallelMesh(ParallelSizes(tensor=world_size)).group("tp")
    rows = PADDED // world_size
    real = max(0, min(rows, WORDS - rank * rows))
    found = {}
    original = loss_module.CHUNK_ELEMENTS, loss_module.LINEAR_CHUNK_ELEMENTS
    loss_module.LINEAR_CHUNK_ROWS, least = 3, loss_module.LINEAR_CHUNK_ROWS
    for dtype, small, sequence, fused in itertools.product(
        (torch.float64, torch.float32, torch.bfloat16), (False, True), (False, True), (False, True)
    ):
        loss_module.CHUNK_ELEMENTS, loss_module.LINEAR_CHUNK_ELEMENTS = (1, 1) if small else original
        hidden, weight, labels, upstream = _data(dtype)
        weight = weight.chunk(world_size)[rank].contiguous().requires_grad_()
        gather = sequence and group is not None
        hidden = (hidden.chunk(world_size)[rank] if gather else hidden).contiguous().requires_grad_()
        weight.main_grad = torch.full(
            weight.shape, torch.nan, dtype=torch.promote_types(dtype, torch.float32)
        )
        weight.overwrite_main_grad = True
        value = linear_cross_entropy(hidden, weight, labels, LinearPlan(group, gather, fused), real)
        (value * upstream).sum().backward()
        assert (weight.grad is None) == fused
        gradient = weight.main_grad if fused else weight.grad
        found[f"linear {dtype} small={small} sp={sequence} fused={fused}"] = (
            value,
            hidden.grad,
            gradient,
            gather,
        )
        if not sequence and not fused:
            whole = _data(dtype)[0]
            logits = (whole @ weight.detach().t()).requires_grad_()
            value = vocab_parallel_cross_entropy(logits, labels, group, real)
            (value * upstream).sum().backward()
            found[f"logits {dtype} small={small}"] = (value, None, logits.grad, False)
    loss_module.CHUNK_ELEMENTS, loss_module.LINEAR_CHUNK_ELEMENTS = original
    loss_module.LINEAR_CHUNK_ROWS = least
    return {
        cell: tuple(v.detach() if isinstance(v, Tensor) else v for v in values)
        for cell, values in found.items()
    }


def _expected(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden, weight, labels, upstream = _data(dtype)
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = hidden @ weight.t()
    logits.retain_grad()
    value = naive_cross_entropy(logits, labels, WORDS)
    (value * upstream).sum().backward()
    return value.detach(), hidden.grad, weight.grad, logits.grad


TOLERANCE = {"torch.float64": 1e-13, "torch.float32": 1e-6, "torch.bfloat16": 2e-2}


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_losses_and_gradients_equal_the_naive_ones(world_size: int) -> None:
    """X05: chunks or not, tensor parallel or not, padding masked out and without gradient."""
    ranks = run_ranks(loss_cells, world_size)
    for cell, first in ranks[0].items():
        kind, dtype = cell.split()[:2]
        tolerance = TOLERANCE[dtype]
        value, hidden_grad, weight_grad, logits_grad = _expected(getattr(torch, dtype.removeprefix("torch.")))
        for r in ranks:
            assert torch.equal(r[cell][0], first[0]), (cell, "ranks differ")
        assert relative_error(first[0], value) < tolerance, cell
        if kind == "logits":
            whole = torch.cat([r[cell][2] for r in ranks], -1)
            assert relative_error(whole, logits_grad) < tolerance, cell
            assert whole[..., WORDS:].eq(0).all(), cell
            continue
        whole = torch.cat([r[cell][2] for r in ranks])
        assert relative_error(whole, weight_grad) < tolerance, cell
        assert whole[WORDS:].eq(0).all(), cell
        got = torch.cat([r[cell][1] for r in ranks]) if first[3] else first[1]
        assert relative_error(got, hidden_grad) < tolerance, cell


class _Largest(TorchDispatchMode):
    """Number of elements of the largest fp32 tensor that an operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.dtype == torch.float32:
                self.largest = max(self.largest, tensor.numel())
        return out


@pytest.mark.parametrize("linear", [False, True])
def test_logits_never_exist_whole_in_fp32(linear: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk at most, forward and backward; from the head on also for fp32 models."""
    tokens, words, hidden = 256, 128, 8
    for name in ("CHUNK_ELEMENTS", "LINEAR_CHUNK_ELEMENTS"):
        monkeypatch.setattr(loss_module, name, 32 * words)
    monkeypatch.setattr(loss_module, "LINEAR_CHUNK_ROWS", 32)
    dtype = torch.float32 if linear else torch.bfloat16
    labels = torch.randint(words, (tokens,))
    x, weight = torch.randn(tokens, hidden).to(dtype), torch.randn(words, hidden).to(dtype)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    with _Largest() as mode:
        if linear:
            value = linear_cross_entropy(x, weight, labels, LinearPlan())
        else:
            value = vocab_parallel_cross_entropy(x @ weight.t(), labels)
        value.sum().backward()
    assert 0 < mode.largest <= 32 * words


def test_recompute_no_grad_and_meta() -> None:
    hidden, weight, labels, _ = _data(torch.float32)
    expected = _expected(torch.float32)[0]
    for reentrant in (True, False):
        x = hidden.clone().requires_grad_()
        value = checkpoint(
            lambda h: linear_cross_entropy(h, weight, labels, LinearPlan(), WORDS), x, use_reentrant=reentrant
        )
        value.sum().backward()
        assert relative_error(value, expected) < 1e-6 and x.grad is not None
    with torch.no_grad():
        assert (
            relative_error(vocab_parallel_cross_entropy(hidden @ weight.t(), labels, None, WORDS), expected)
            < 1e-6
        )
    meta = [t.to("meta") for t in (hidden, weight, labels)]
    meta[0].requires_grad_()
    linear_cross_entropy(*meta, LinearPlan(), WORDS).sum().backward()
    assert meta[0].grad.shape == hidden.shape


def test_huge_logits_stay_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    value = vocab_parallel_cross_entropy(logits, torch.tensor([1]))
    value.sum().backward()
    assert float(value.detach()) == 2e4 and logits.grad.isfinite().all()
