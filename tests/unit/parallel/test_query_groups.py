"""Grouped-query attention over tensor-parallel ranks equals one rank, also with fewer groups than ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.parallel.mesh import ParallelMesh, ParallelSizes
from megatron.parallel.query_groups import QueryGroups
from megatron.parallel.tensor import LinearPlan, linear
from tests.pool import run_ranks
from tests.unit.parallel.sharding import relative_error

SEQUENCE, BATCH, HIDDEN, HEADS, DIM = 5, 2, 12, 8, 6


def _attend(heads: QueryGroups, x: Tensor, weight: Tensor, plan: LinearPlan) -> Tensor:
    query, key, value, _ = heads.split(linear(x, weight, None, plan))
    q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
    grouped = q.shape[1] != k.shape[1]
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    return out.permute(2, 0, 1, 3).flatten(2)


def _data(groups: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(SEQUENCE, BATCH, HIDDEN)
    return x, torch.randn((HEADS + 2 * groups) * DIM, HIDDEN) / 3, torch.randn(SEQUENCE, BATCH, HEADS * DIM)


def attention_pieces(rank: int, world_size: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's output columns, the input gradient, its rows of the weight gradient."""
    mesh = ParallelMesh(ParallelSizes(tensor=world_size))
    x, weight, upstream = _data(groups)
    x.requires_grad_()
    weight = weight.chunk(world_size)[rank].contiguous().requires_grad_()
    out = _attend(QueryGroups(HEADS, groups, DIM, mesh), x, weight, LinearPlan(mesh.group("tp")))
    (out * upstream.chunk(world_size, -1)[rank]).sum().backward()
    return out.detach(), x.grad, weight.grad


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_equals_one_rank(groups: int, world_size: int) -> None:
    ranks = run_ranks(attention_pieces, world_size, groups)
    x, weight, upstream = _data(groups)
    x.requires_grad_(), weight.requires_grad_()
    out = _attend(QueryGroups(HEADS, groups, DIM, ParallelMesh.single()), x, weight, LinearPlan())
    (out * upstream).sum().backward()
    assert relative_error(torch.cat([r[0] for r in ranks], -1), out) < 1e-6
    assert relative_error(ranks[0][1], x.grad) < 1e-6
    assert relative_error(torch.cat([r[2] for r in ranks]), weight.grad) < 1e-6


@pytest.mark.parametrize(
    ("heads", "groups", "size", "words"),
    [
        (8, 3, 1, "--num-attention-heads 8 does not divide by --num-query-groups 3"),
        (6, 2, 4, "--num-attention-heads 6 does not divide by --tensor-model-parallel-size 4"),
        (12, 6, 4, "--num-query-groups 6 and --tensor-model-parallel-size 4: one must divide"),
        (8, 1, 4, r"the 10 rows of linear_qkv .* do not divide by --tensor-model-parallel-size 4"),
    ],
)
def test_heads_that_cannot_be_shared_out(heads: int, groups: int, size: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        QueryGroups(heads, groups, 1, ParallelMesh(ParallelSizes(tensor=size), rank=0))
