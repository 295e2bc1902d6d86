"""The layout as arithmetic: every element once, whole rows, alignment, padding."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.fsdp.layout import (
    ALIGNMENT_BYTES,
    GroupLayout,
    atomic_layout,
    choose_row_widths,
    row_layout,
    row_numel,
)

SHAPES = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 9)),
        st.tuples(st.integers(0, 9), st.integers(1, 7)),
        st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4)),
    ),
    min_size=1,
    max_size=6,
)


def groups_of(
    shapes: list[tuple[int, ...]], num_shards: int, itemsize: int
) -> list[tuple[list[int], GroupLayout]]:
    by_width: dict[int, list[int]] = {}
    for index, width in enumerate(choose_row_widths(shapes)):
        by_width.setdefault(width, []).append(index)
    return [
        (indices, row_layout([shapes[i] for i in indices], width, num_shards, itemsize))
        for width, indices in by_width.items()
    ]


def check_layout(layout: GroupLayout, itemsize: int) -> None:
    """Items do not overlap, are aligned, and the shards' rows are each item's rows, once each, in order."""
    covered: set[int] = set()
    for index, item in enumerate(layout.items):
        assert item.offset * itemsize % ALIGNMENT_BYTES == 0
        span = set(range(item.offset, item.offset + item.numel))
        assert not covered & span
        covered |= span
        assert item.offset + item.numel <= layout.numel
        rows: list[int] = []
        for shard in range(layout.num_shards):
            part = layout.rows(index, shard)
            rows += range(part.start, part.stop)
            assert 0 <= part.shard_offset <= layout.shard_numel
            if part.num_rows:
                start = item.offset + part.start * row_numel(item.shape)
                assert start == shard * layout.shard_numel + part.shard_offset
        assert rows == list(range(item.shape[0] if item.numel else 0))
    padding = {i for start, stop in layout.padding_ranges() for i in range(start, stop)}
    assert padding == set(range(layout.numel)) - covered
    assert len(padding) == layout.padding_numel


@settings(max_examples=150, deadline=None)
@given(shapes=SHAPES, num_shards=st.integers(1, 9), itemsize=st.sampled_from([1, 2, 4, 8]))
def test_rows_of_all_shards_are_the_parameters(shapes, num_shards, itemsize):
    """Any shapes, any number of shards, ranks that hold nothing included (F13, F14)."""
    seen: list[int] = []
    for indices, layout in groups_of(shapes, num_shards, itemsize):
        check_layout(layout, itemsize)
        seen += indices
    assert sorted(seen) == list(range(len(shapes)))


@settings(max_examples=100, deadline=None)
@given(shapes=SHAPES, num_shards=st.integers(1, 9))
def test_atomic_layout_cuts_nothing(shapes, num_shards):
    """Every parameter lies whole in one shard."""
    layout = atomic_layout(shapes, num_shards)
    check_layout(layout, 4)
    for index, item in enumerate(layout.items):
        holders = [shard for shard in range(num_shards) if layout.rows(index, shard).num_rows]
        assert len(holders) == (1 if item.numel else 0)


def test_vectors_join_matrices_that_they_divide_into():
    """A norm weight costs no group of its own where it is a whole number of rows."""
    assert choose_row_widths([(8, 4), (4,), (6,), (3, 6), (5,)]) == [4, 4, 6, 6, 1]


DENSE_LAYER = {  # of DeepSeek-V3, (out, in)
    "input_layernorm": (7168,),
    "linear_q_down_proj": (1536, 7168),
    "q_layernorm": (1536,),
    "linear_q_up_proj": (128 * 192, 1536),
    "linear_kv_down_proj": (576, 7168),
    "kv_layernorm": (512,),
    "linear_kv_up_proj": (128 * 256, 512),
    "linear_proj": (7168, 128 * 128),
    "pre_mlp_layernorm": (7168,),
    "linear_fc1": (2 * 18432, 7168),
    "linear_fc2": (7168, 18432),
}
ATTENTION = {name: shape for name, shape in DENSE_LAYER.items() if "fc" not in name}
MOE_LAYER = {
    **ATTENTION,
    "router": (256, 7168),
    "shared_fc1": (2 * 2048, 7168),
    "shared_fc2": (7168, 2048),
}


TABLE = (Path(__file__).parents[3] / "docs/concepts/fsdp.md").read_text().splitlines()


@pytest.mark.parametrize("layer", [DENSE_LAYER, MOE_LAYER], ids=["dense", "moe"])
@pytest.mark.parametrize("num_shards, bound", [(8, 0.01), (64, 0.01), (256, 0.01), (1024, 0.025)])
def test_padding_of_deepseek_v3(layer, num_shards, bound):
    """Under 1 % up to 256 shards; at 1024 what the rule gives (F16). A common multiple of rows would pad by 36 %."""
    shapes = list(layer.values())
    layouts = [layout for _, layout in groups_of(shapes, num_shards, 2)]
    padding = sum(layout.padding_numel for layout in layouts)
    total = sum(math.prod(shape) for shape in shapes)
    assert padding / total < bound
    row = next(line for line in TABLE if line.startswith("| dense" if layer is DENSE_LAYER else "| MoE"))
    printed = dict(zip((8, 64, 256, 1024), row.split("|")[2:6], strict=True))
    assert float(printed[num_shards]) == pytest.approx(100 * padding / total, abs=5e-4), "the table in docs"
