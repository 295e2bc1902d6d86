"""Any layout of a tensor starts from the same bits."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from megatron.models.init import (
    BLOCK_ELEMENTS,
    GlobalTensor,
    Initializer,
    InitSpec,
    draw_rows,
    fill_local,
    materialise,
    rows_per_block,
)
from megatron.parallel.annotate import ParameterAnnotation, annotate, global_shape, local_chunks
from megatron.parallel.mesh import ParallelMesh

KINDS = st.sampled_from(
    [InitSpec("normal", 0.02), InitSpec("uniform", 0.1), InitSpec("ones"), InitSpec("zeros")]
)
# rows long enough that a handful of them is more than a block, and short ones
SHAPES = st.one_of(
    st.tuples(st.integers(1, 9), st.sampled_from([1, 3, 20000, 40000, 70000])),
    st.tuples(st.integers(1, 2 * BLOCK_ELEMENTS + 5)),
    st.tuples(st.integers(1, 7), st.integers(1, 3), st.sampled_from([1, 7, 9000])),
)


def reference(tensor: GlobalTensor) -> torch.Tensor:
    """The definition, written out: blocks of rows, each from its own generator."""
    whole = draw_rows(tensor, 0, tensor.shape[0])
    block = max(1, BLOCK_ELEMENTS // math.prod(tensor.shape[1:]))
    pieces = [
        draw_rows(tensor, start, min(start + block, tensor.shape[0]))
        for start in range(0, tensor.shape[0], block)
    ]
    assert torch.equal(torch.cat(pieces), whole)
    return whole


@settings(max_examples=40, deadline=None)
@given(shape=SHAPES, spec=KINDS, data=st.data())
def test_any_cut_of_rows_gives_the_same_bits(shape, spec, data):
    tensor = GlobalTensor("decoder.layers.3.w", shape, spec, seed=7)
    whole = reference(tensor)
    cuts = sorted(data.draw(st.lists(st.integers(0, shape[0]), max_size=4)))
    bounds = [0, *cuts, shape[0]]
    pieces = [draw_rows(tensor, first, last) for first, last in itertools.pairwise(bounds)]
    assert torch.equal(torch.cat(pieces), whole)


@settings(max_examples=60, deadline=None)
@given(
    spec=KINDS,
    size=st.sampled_from([1, 2, 4]),
    dim=st.sampled_from([None, 0, 1]),
    parts=st.sampled_from([1, 2]),
    ndim=st.sampled_from([1, 2, 3]),
    padding=st.integers(0, 5),
    data=st.data(),
)
def test_any_tensor_parallel_layout_gives_the_same_bits(spec, size, dim, parts, ndim, padding, data):
    """Row, column and gated cuts, padding rows, 1-D and 3-D tensors, each rank filled in arbitrary pieces of
    rows.
    """
    if ndim == 1 and dim == 1:
        dim = 0
    shape = [data.draw(st.integers(1, 3)) for _ in range(ndim)]
    shape[-1] *= 9000
    if dim is not None:
        shape[dim] *= size * parts
    rows = None
    if dim != 1 and parts == 1 and padding:
        rows = max(1, shape[0] - padding)
    annotation = ParameterAnnotation(
        tensor_parallel_dim=dim, tensor_parallel_parts=parts if dim is not None else 1, num_global_rows=rows
    )
    true_shape = tuple([rows, *shape[1:]] if rows else shape)
    tensor = GlobalTensor("w", true_shape, spec, seed=3)
    whole = draw_rows(tensor, 0, true_shape[0])
    padded = torch.zeros(shape)
    padded[: true_shape[0]] = whole
    local_shape = list(shape)
    if dim is not None:
        local_shape[dim] //= size
    for rank in range(size):
        assert global_shape(annotation, local_shape, size) == true_shape
        chunks = local_chunks(annotation, local_shape, rank, size)
        cut = data.draw(st.integers(0, local_shape[0]))
        local = torch.full(local_shape, float("nan"))
        fill_local(local[:cut], tensor, chunks, 0)
        fill_local(local[cut:], tensor, chunks, cut)
        expected = padded
        if dim is not None:
            pieces = [
                part.chunk(size, dim)[rank] for part in padded.chunk(annotation.tensor_parallel_parts, dim)
            ]
            expected = torch.cat(pieces, dim)
        assert torch.equal(local, expected)


def test_values_follow_name_seed_and_spec():
    def draw(**changes):
        base = {"name": "a", "shape": (40, 5000), "spec": InitSpec("normal", 0.5), "seed": 1}
        return draw_rows(GlobalTensor(**{**base, **changes}), 0, 40)

    assert torch.equal(draw(), draw())
    assert not torch.equal(draw(), draw(seed=2))
    assert not torch.equal(draw(), draw(name="b"))
    assert abs(draw().std().item() - 0.5) < 0.005
    assert abs(draw(spec=InitSpec("uniform", 0.5)).std().item() - 0.5) < 0.005
    assert draw(spec=InitSpec("uniform", 0.5)).abs().max().item() <= math.sqrt(3) * 0.5
    block = rows_per_block(5000)
    assert not torch.equal(draw()[:block], draw()[block : 2 * block])


def test_first_values_never_change():
    """A golden value: changing the blocks, the seeds or the generator changes every run."""
    tensor = GlobalTensor(
        "decoder.layers.0.mlp.linear_fc1.weight", (8, 16), InitSpec("normal", 0.02), seed=1234
    )
    golden = torch.tensor(GOLDEN)
    torch.testing.assert_close(draw_rows(tensor, 0, 1)[0, :4], golden, rtol=1e-6, atol=0)


GOLDEN = [0.02620331197977066, -0.011716226115822792, 0.010828670114278793, 0.011424873024225235]


class Tied(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.first = nn.Linear(6, 4, device=device)
        self.second = nn.Linear(6, 4, bias=False, device=device)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.empty((), device=device), requires_grad=False)
        self.first.weight.init_spec = InitSpec("normal", 1.0)
        self.first.bias.init_spec = InitSpec("ones")
        self.scale.init_spec = InitSpec("normal", 1.0)
        annotate(self.first.weight, ParameterAnnotation(num_global_rows=3))


def test_materialise_keeps_ties_attributes_and_requires_grad():
    initializer = Initializer(5, ParallelMesh.single())
    module, direct = Tied("meta"), Tied("cpu")
    materialise(module, initializer)
    materialise(direct, initializer)
    assert module.first.weight is module.second.weight
    assert not module.scale.requires_grad and module.scale.item() == direct.scale.item() != 0
    assert torch.equal(module.first.weight, direct.first.weight)
    assert module.first.weight[3].count_nonzero() == 0 and module.first.weight[:3].count_nonzero() == 18
    assert torch.equal(module.first.bias, torch.ones(4))
    assert module.first.weight.init_spec == InitSpec("normal", 1.0)


def test_buffers_without_a_maker_are_refused():
    """I02: an emptied buffer would be garbage."""
    module = nn.BatchNorm1d(3, affine=False, device="meta")
    with pytest.raises(AssertionError, match="reset_buffers"):
        materialise(module, Initializer(1, ParallelMesh.single()))


def test_low_precision_is_the_rounded_fp32_value():
    tensor = GlobalTensor("w", (5, 5), InitSpec("normal", 1.0), 1)
    chunks = local_chunks(ParameterAnnotation(), (5, 5), 0, 1)
    low, wide = torch.empty(5, 5, dtype=torch.bfloat16), torch.empty(5, 5, dtype=torch.float64)
    fill_local(low, tensor, chunks, 0)
    fill_local(wide, tensor, chunks, 0)
    assert torch.equal(low, draw_rows(tensor, 0, 5).bfloat16())
    assert torch.equal(wide, draw_rows(tensor, 0, 5).double())
