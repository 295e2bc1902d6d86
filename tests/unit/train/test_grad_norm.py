"""Norms and counts over shards, against torch on whole tensors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from megatron.parallel.annotate import ParameterAnnotation, annotate
from megatron.parallel.mesh import ParallelMesh, ParallelSizes
from megatron.train.grad_norm import (
    GradientStatistics,
    clip_coefficient,
    count_zeros,
    counts_here,
    num_padding_elements,
    parameter_norm,
    sum_of_squares,
    total_norm,
)
from tests.pool import run_ranks


def test_sum_of_squares_is_precise_where_torch_is_not() -> None:
    values = torch.randn(1_000_003, generator=torch.Generator().manual_seed(0))
    exact = values.double().square().sum().item()
    assert sum_of_squares([values]).item() == pytest.approx(exact, rel=1e-7)
    assert sum_of_squares([]).item() == 0.0
    assert sum_of_squares([torch.zeros(0, 4), torch.full((2, 3), 2.0)]).item() == 24.0


def test_zeros_are_counted() -> None:
    assert count_zeros([torch.tensor([0.0, 1.0, 0.0]), torch.zeros(2, 2), torch.ones(0)]).item() == 6


def test_clip_coefficient() -> None:
    assert clip_coefficient(4.0, 1.0) == pytest.approx(0.25, rel=1e-6)
    assert clip_coefficient(0.5, 1.0) == 1.0
    assert clip_coefficient(1e9, 0.0) == 1.0


def test_replicated_over_tensor_ranks_counts_once() -> None:
    """C03: a parameter that all tensor-parallel ranks hold is counted by the first."""
    first, second = (ParallelMesh(ParallelSizes(tensor=2), rank=rank) for rank in (0, 1))
    replicated = torch.ones(3)
    cut = annotate(torch.ones(3), ParameterAnnotation(tensor_parallel_dim=0))
    assert [counts_here(replicated, mesh) for mesh in (first, second)] == [True, False]
    assert [counts_here(cut, mesh) for mesh in (first, second)] == [True, True]


def test_plain_tensors_are_replicated_over_data_ranks() -> None:
    meshes = [ParallelMesh(ParallelSizes(context=2, data=2), rank=rank) for rank in range(4)]
    assert [counts_here(torch.ones(()), mesh) for mesh in meshes] == [True, False, False, False]


def test_padding_rows_are_not_counted() -> None:
    mesh = ParallelMesh(ParallelSizes(tensor=2), rank=0)
    parameter = torch.nn.Parameter(torch.ones(4, 5))
    annotate(parameter, ParameterAnnotation(tensor_parallel_dim=0, num_global_rows=7))
    assert num_padding_elements([parameter], mesh) == 5
    parameter.grad = torch.zeros(4, 5)
    statistics = GradientStatistics([parameter], mesh, with_zeros=True)
    assert statistics.local().tolist() == [0.0, 15.0]


SHAPES = [(7, 3), (5,), (2000, 3), (1, 4)]


def whole_tensors(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=generator) for shape in SHAPES]
    tensors[2][::3] = 0.0
    return tensors


def sharded_numbers(rank: int, world_size: int, outer: int, replicate: bool) -> dict[str, Any]:
    """Norms of gradients that are shards on an HSDP mesh whose DTensors know the inner axis only."""
    sizes = ParallelSizes(data=world_size, data_outer=outer)
    mesh = ParallelMesh(sizes)
    inner: DeviceMesh = mesh.device_mesh("fsdp")
    placement = [Replicate() if replicate else Shard(0)]
    parameters = []
    for value, grad in zip(whole_tensors(1), whole_tensors(2), strict=True):
        parameter = torch.nn.Parameter(distribute_tensor(value, inner, placement, src_data_rank=None))
        parameter.grad = distribute_tensor(grad, inner, placement, src_data_rank=None)
        assert isinstance(parameter.grad, DTensor)
        parameters.append(parameter)
    scalar = torch.nn.Parameter(torch.tensor(3.0))
    scalar.grad = torch.tensor(4.0)
    parameters.append(scalar)
    statistics = GradientStatistics(parameters, mesh, with_zeros=True).local()
    torch.distributed.all_reduce(statistics)
    pairs = [(parameter, parameter.grad) for parameter in parameters]
    return {
        "statistics": statistics.tolist(),
        "two": total_norm(pairs, mesh).item(),
        "inf": total_norm(pairs, mesh, norm_type=math.inf).item(),
        "parameters": parameter_norm(parameters, mesh).item(),
    }


@pytest.mark.parametrize(("world_size", "outer"), [(1, 1), (2, 1), (3, 1), (4, 2)])
@pytest.mark.parametrize("replicate", [False, True])
def test_shards_add_up_to_the_whole(world_size: int, outer: int, replicate: bool) -> None:
    """C06: L2 and infinity norms, zeros and the parameters' norm, equal on all ranks."""
    gradients = [grad.flatten() for grad in whole_tensors(2)] + [torch.tensor([4.0])]
    values = [value.flatten() for value in whole_tensors(1)] + [torch.tensor([3.0])]
    flat, flat_values = torch.cat(gradients).double(), torch.cat(values).double()
    results = run_ranks(sharded_numbers, world_size, outer, replicate)
    assert all(result == results[0] for result in results)
    squares, zeros = results[0]["statistics"]
    assert squares == pytest.approx(flat.square().sum().item(), rel=1e-7)
    assert zeros == (flat == 0).sum().item()
    assert results[0]["two"] == pytest.approx(flat.norm().item(), rel=1e-7)
    assert results[0]["inf"] == flat.abs().max().item()
    assert results[0]["parameters"] == pytest.approx(flat_values.norm().item(), rel=1e-7)


def test_other_norms_are_refused() -> None:
    with pytest.raises(ValueError, match="norm_type"):
        total_norm([], ParallelMesh.single(), norm_type=1.0)


def test_missing_gradients_count_nothing() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    assert GradientStatistics([parameter], ParallelMesh.single()).local().tolist() == [0.0, 0.0]
    assert total_norm([(parameter, None)], ParallelMesh.single()).item() == 0.0
