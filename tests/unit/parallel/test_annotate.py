"""Annotations: local pieces and global offsets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from megatron.parallel.annotate import (
    Chunk,
    ParameterAnnotation,
    annotate,
    annotation_of,
    global_shape,
    local_chunks,
)
from tests.unit.parallel.sharding import cut, join


def test_gated_weight_keeps_gate_and_up_apart() -> None:
    """I04: each rank holds its piece of both halves; globally [gate; up]."""
    gated = ParameterAnnotation(0, 2)
    assert global_shape(gated, (4, 3), 2) == (8, 3)
    assert local_chunks(gated, (4, 3), 1, 2) == [
        Chunk((0, 0), (2, 0), (2, 3)),
        Chunk((2, 0), (6, 0), (2, 3)),
    ]


def test_padding_rows_belong_to_no_chunk() -> None:
    padded = ParameterAnnotation(0, num_global_rows=5)
    assert global_shape(padded, (4, 2), 2) == (5, 2)
    assert local_chunks(padded, (4, 2), 1, 2) == [Chunk((0, 0), (4, 0), (1, 2))]
    assert local_chunks(ParameterAnnotation(0, num_global_rows=3), (4, 2), 1, 2) == []


def test_replicated_and_scalar() -> None:
    assert local_chunks(ParameterAnnotation(), (3,), 1, 4) == [Chunk((0,), (0,), (3,))]
    assert local_chunks(ParameterAnnotation(), (), 1, 4) == [Chunk((), (), ())]
    assert local_chunks(ParameterAnnotation(), (), 0, 1)[0].numel == 1


@given(
    size=st.sampled_from([1, 2, 3, 4]),
    parts=st.integers(1, 3),
    length=st.integers(1, 3),
    dim=st.sampled_from([0, 1, None]),
)
def test_pieces_make_the_whole(size: int, parts: int, length: int, dim: int | None) -> None:
    annotation = ParameterAnnotation(dim, parts if dim is not None else 1)
    shape = [5, 7]
    if dim is not None:
        shape[dim] = size * parts * length
    whole = torch.arange(float(shape[0] * shape[1])).view(shape)
    assert torch.equal(join([cut(whole, annotation, r, size) for r in range(size)], annotation), whole)


def test_attached_record_and_default() -> None:
    parameter = nn.Parameter(torch.empty(2, device="meta"))
    assert annotation_of(parameter) == ParameterAnnotation()
    annotate(parameter, ParameterAnnotation(0, expert=True))
    assert annotation_of(parameter).tensor_axis == "etp"


def test_contradictions_are_refused() -> None:
    with pytest.raises(ValueError, match="replicated_gradient"):
        ParameterAnnotation(0, replicated_gradient="sum")
    with pytest.raises(ValueError, match="tensor_parallel_parts"):
        ParameterAnnotation(0, 0)
