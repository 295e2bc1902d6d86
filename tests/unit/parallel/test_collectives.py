"""Collectives and their gradients against the same computation on one rank."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.parallel import collectives
from megatron.parallel.mesh import ParallelMesh, ParallelSizes
from tests.pool import run_ranks


def _inputs(world_size: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(3)
    return [torch.randn(4 * world_size, 2 * world_size, 3).to(dtype) for _ in range(world_size)]


def _weight(out: Tensor, rank: int) -> Tensor:
    return torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype) * (rank + 1)


def run_function(rank: int, world_size: int, name: str, arguments: dict[str, Any], dtype: torch.dtype) -> Any:
    """One function forward and backward; the upstream gradient differs by rank unless it must not."""
    group = ParallelMesh(ParallelSizes(tensor=world_size)).group("tp")
    x = _inputs(world_size, dtype)[0 if name == "scatter" else rank].requires_grad_()
    out = getattr(collectives, name)(x, group, **arguments)
    same = name in ("reduce_from", "gather")
    out.backward(_weight(out, 0 if same else rank))
    return out.detach(), x.grad


def _expected(name: str, dim: int, world_size: int, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(output, gradient) of `rank`, from everybody's inputs in float64."""
    inputs = [x.double() for x in _inputs(world_size, dtype)]
    total = sum(inputs)

    def piece(x: Tensor, r: int = rank) -> Tensor:
        return x.chunk(world_size, dim)[r]

    whole = torch.cat(inputs, dim)
    if name == "copy_to":
        return inputs[rank], sum(_weight(inputs[0], r) for r in range(world_size))
    if name == "reduce_from":
        return total, _weight(total, 0)
    if name == "all_gather":
        return whole, sum(piece(_weight(whole, r)) for r in range(world_size))
    if name == "gather":
        return whole, piece(_weight(whole, 0))
    if name == "scatter":
        return piece(inputs[0]), torch.cat([_weight(piece(inputs[0]), r) for r in range(world_size)], dim)
    if name == "reduce_scatter":
        return piece(total), torch.cat([_weight(piece(total), r) for r in range(world_size)], dim)
    assert name == "all_to_all"
    weights = [_weight(inputs[0], r) for r in range(world_size)]
    return torch.cat([piece(x) for x in inputs]), torch.cat([piece(w) for w in weights])


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    ("name", "dim"),
    [
        ("copy_to", None),
        ("reduce_from", None),
        ("all_gather", 0),
        ("all_gather", 1),
        ("gather", -2),
        ("scatter", 1),
        ("reduce_scatter", 0),
        ("reduce_scatter", 1),
        ("all_to_all", None),
    ],
)
def test_forward_and_backward(name: str, dim: int | None, world_size: int) -> None:
    arguments = {} if dim is None else {"dim": dim}
    results = run_ranks(run_function, world_size, name, arguments, torch.float32)
    for rank, got in enumerate(results):
        expected = _expected(name, dim or 0, world_size, rank, torch.float32)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=1e-5)


def bf16_reduce_scatter(rank: int, world_size: int) -> Tensor:
    """256 and three times 0.5: in bf16 steps the halves would be lost."""
    group = ParallelMesh(ParallelSizes(tensor=world_size)).group("tp")
    x = torch.full((world_size, 1), 256.0 if rank == 0 else 0.75, dtype=torch.bfloat16)
    return collectives.reduce_scatter(x, group)


def test_reduce_scatter_sums_16_bit_types_in_fp32() -> None:
    """F17's kind: 256 + 3 * 0.75 = 258.25, to the nearest bf16: 258, not 256."""
    assert all(float(out) == 258 for out in run_ranks(bf16_reduce_scatter, 4))


def uneven_all_to_all(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """Rank 0 sends everything to rank 1, which sends nothing."""
    group = ParallelMesh(ParallelSizes(tensor=world_size)).group("tp")
    x = torch.arange(3.0).view(3, 1) if rank == 0 else torch.zeros(0, 1)
    x.requires_grad_()
    splits = ([0, 0], [0, 3]) if rank == 0 else ([3, 0], [0, 0])
    out = collectives.all_to_all(x, group, *splits)
    (out.sum() * 2).backward()
    return out.detach(), x.grad


def test_uneven_all_to_all() -> None:
    (sent, sender_grad), (received, receiver_grad) = run_ranks(uneven_all_to_all, 2)
    assert sent.shape == (0, 1) and receiver_grad.shape == (0, 1)
    assert received.flatten().tolist() == [0, 1, 2]
    assert sender_grad.flatten().tolist() == [2, 2, 2]


def test_no_group_is_the_identity() -> None:
    x = torch.ones(2)
    for name in ("copy_to", "reduce_from", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all"):
        assert getattr(collectives, name)(x, None) is x


class _Step:
    """Stands for whatever a graph holds."""


class _Hold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, step: _Step) -> Tensor:
        ctx.step = step
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None


def graphs_left(rank: int, world_size: int) -> dict[str, bool]:
    """Which functions keep the graph of a step after it, by name."""
    group = ParallelMesh(ParallelSizes(tensor=world_size)).group("tp")
    calls = {
        name: (lambda x, name=name: getattr(collectives, name)(x, group))
        for name in ("copy_to", "reduce_from")
    }
    calls |= {
        name: (lambda x, name=name: getattr(collectives, name)(x, group, 0))
        for name in ("all_gather", "gather", "scatter", "reduce_scatter")
    }
    calls["all_to_all"] = lambda x: collectives.all_to_all(x, group)
    calls["exchange"] = lambda x: collectives.Exchange(x, group).wait()
    left = {}
    for name, call in calls.items():
        for backward in (True, False):
            step = _Step()
            alive = weakref.ref(step)
            out = call(_Hold.apply(torch.ones(4, 4, requires_grad=True), step))
            if backward:
                out.sum().backward()
            del out, step
            for _ in range(100):  # gloo's thread may hold what it sent for a moment
                gc.collect()
                if alive() is None:
                    break
                time.sleep(0.02)
            left[f"{name}, {backward=}"] = alive() is not None
    return left


def test_nothing_keeps_the_graph_of_a_step() -> None:
    """A function whose ctx holds its output, or an object that does, is never freed: memory grows by every step."""
    for left in run_ranks(graphs_left, 2):
        assert len(left) == 16 and not any(left.values()), left
