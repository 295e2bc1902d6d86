"""Gradients of replicated parameters: summed over the tensor axis, once."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.parallel.annotate import ParameterAnnotation
from megatron.parallel.mesh import ParallelMesh, ParallelSizes
from megatron.parallel.replicated import sum_replicated_gradients
from tests.pool import run_ranks

SUM = ParameterAnnotation(replicated_gradient="sum")


def mixed_gradients(rank: int, world_size: int) -> tuple[list[Tensor], int]:
    """Partial, complete, empty and bf16 gradients; how many all-reduces they took."""
    import torch.distributed as dist

    mesh = ParallelMesh(ParallelSizes(tensor=2, data=world_size // 2))
    tp = mesh.rank("tp")
    gradients = [
        (SUM, torch.tensor([256.0, 2.0]) if tp == 0 else torch.tensor([1.0, 3.0])),
        (ParameterAnnotation(), torch.tensor([5.0])),
        (ParameterAnnotation(0), torch.tensor([7.0 + tp])),
        (SUM, torch.zeros(0)),
        (SUM, torch.full((2, 2), 1.0 + tp).t()),
        (ParameterAnnotation(replicated_gradient="sum", expert=True), torch.tensor([1.0 + rank])),
    ]
    calls = []
    original = dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs)
    try:
        sum_replicated_gradients(gradients, mesh)
    finally:
        dist.all_reduce = original
    return [gradient for _, gradient in gradients], len(calls)


def test_partial_gradients_are_summed_once() -> None:
    """F17: 256 and 1 make 257 in fp32. P13's kind: complete and cut ones are left alone. One all-reduce for all."""
    for rank, (gradients, calls) in enumerate(run_ranks(mixed_gradients, 4)):
        assert calls == 1
        values = [g.flatten().tolist() for g in gradients]
        # The expert-tensor axis has size 1 here, so expert gradients are complete.
        assert values == [[257.0, 5.0], [5.0], [7.0 + rank % 2], [], [3.0] * 4, [1.0 + rank]]


def test_one_rank_has_nothing_to_do() -> None:
    gradient = torch.ones(2)
    sum_replicated_gradients([(SUM, gradient)], ParallelMesh.single())
    assert gradient.eq(1).all()
