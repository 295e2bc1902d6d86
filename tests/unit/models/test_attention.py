"""Self-attention: layout of the fused projection, document masks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.models.attention import SelfAttention, document_mask
from megatron.models.backends.base import LayerOptions
from megatron.models.backends.torch import TorchBackend
from megatron.models.block import LayerContext
from megatron.parallel.mesh import ParallelMesh
from tests.unit.models.helpers import tiny_config


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_document_mask_is_its_definition(lengths):
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None] + 7
    mask = document_mask(ids)
    length = sum(lengths)
    assert mask.shape == (1, 1, length, length) and mask.dtype is torch.bool
    for query in range(length):
        for key in range(length):
            seen = key <= query and ids[0, key] == ids[0, query]
            assert mask[0, 0, query, key].item() is not bool(seen)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_rows_of_the_projection_go_by_query_group(groups):
    """q heads of the group, then its k, then its v."""
    config = tiny_config(num_query_groups=groups)
    layer = SelfAttention(LayerContext(config, TorchBackend(LayerOptions()), ParallelMesh.single(), 1))
    rows = config.qkv_projection_size
    per_group, d = 4 // groups, 8
    query, key, value, gate = layer._groups.split(torch.arange(rows).expand(3, 2, rows))
    assert gate is None
    assert query.shape == (3, 2, 4, d) and key.shape == value.shape == (3, 2, groups, d)
    for group in range(groups):
        start = group * (per_group + 2) * d
        for head in range(per_group):
            assert query[0, 0, group * per_group + head, 0] == start + head * d
        assert key[2, 1, group, 0] == start + per_group * d
        assert value[2, 1, group, d - 1] == start + (per_group + 2) * d - 1
