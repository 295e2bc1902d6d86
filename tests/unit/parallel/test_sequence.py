"""Scatter and gather along the sequence."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.parallel.mesh import ParallelMesh, ParallelSizes
from megatron.parallel.sequence import check_sequence, gather_sequence, scatter_sequence
from tests.pool import run_ranks


def scatter_and_gather(rank: int, world_size: int, tensor_parallel_use: bool) -> tuple[Tensor, Tensor]:
    """Through both; each rank's use differs (rank + 1) where tensor_parallel_use, else it is the same."""
    group = ParallelMesh(ParallelSizes(tensor=world_size)).group("tp")
    x = torch.arange(8.0).view(4, 2, 1).requires_grad_()
    piece = scatter_sequence(x, group)
    assert piece.shape == (4 // world_size, 2, 1)
    whole = gather_sequence(piece, group, tensor_parallel_use)
    (whole * (rank + 1 if tensor_parallel_use else 1)).sum().backward()
    return whole.detach(), x.grad


@pytest.mark.parametrize(("tensor_parallel_use", "gradient"), [(True, 3.0), (False, 1.0)])
def test_there_and_back(tensor_parallel_use: bool, gradient: float) -> None:
    for whole, grad in run_ranks(scatter_and_gather, 2, tensor_parallel_use):
        assert torch.equal(whole, torch.arange(8.0).view(4, 2, 1))
        assert grad.eq(gradient).all()


def test_length_that_does_not_divide_names_the_flags() -> None:
    with pytest.raises(
        ValueError, match=r"--sequence-parallel: a sequence of 6 .*--tensor-model-parallel-size 4"
    ):
        check_sequence(6, 4)
