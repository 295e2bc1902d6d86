"""Rank order and groups on paper, against megatron-core's and by property."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.parallel.layout import (
    AXES,
    DENSE_ORDER,
    EXPERT_ORDER,
    ParallelSizes,
    all_groups,
    axis_rank,
    coordinates,
    group_ranks,
)

small = st.sampled_from([1, 2])


@st.composite
def sizes(draw: st.DrawFn) -> ParallelSizes:
    expert, expert_tensor, outer = draw(small), draw(small), draw(st.sampled_from([1, 2]))
    return ParallelSizes(
        tensor=draw(small) * expert_tensor,
        pipeline=draw(small),
        context=draw(st.sampled_from([1, 2])),
        data=draw(st.sampled_from([1, 3])) * expert * outer,
        data_outer=outer,
        expert=expert,
        expert_tensor=expert_tensor,
    )


@settings(deadline=None, max_examples=20)
@given(sizes())
def test_groups_of_every_axis_partition_the_world(sizes: ParallelSizes) -> None:
    for axis in AXES:
        groups = all_groups(sizes, axis)
        assert sorted(rank for group in groups for rank in group) == list(range(sizes.world))
        for group in groups:
            assert len(group) == sizes.size(axis)
            assert [axis_rank(sizes, rank, axis) for rank in group] == list(range(len(group)))
            assert all(group_ranks(sizes, rank, axis) == group for rank in group)


@settings(deadline=None, max_examples=20)
@given(sizes())
def test_outer_data_axis_cuts_both_views_alike(sizes: ParallelSizes) -> None:
    for rank in range(sizes.world):
        dense, expert = coordinates(sizes, rank, DENSE_ORDER), coordinates(sizes, rank, EXPERT_ORDER)
        assert (dense["dp_outer"], dense["pp"]) == (expert["edp_outer"], expert["pp"])


def test_rank_order_is_the_one_in_megatrons_documentation() -> None:
    """The example of 16 GPUs in megatron.core.parallel_state.initialize_model_parallel: tensor 2, pipeline 4."""
    sizes = ParallelSizes(tensor=2, pipeline=4, data=2)
    assert all_groups(sizes, "tp") == [[i, i + 1] for i in range(0, 16, 2)]
    assert all_groups(sizes, "dp") == [[i + j, i + j + 2] for i in range(0, 16, 4) for j in (0, 1)]
    assert all_groups(sizes, "pp") == [[i, i + 4, i + 8, i + 12] for i in range(4)]


_WITNESS = """
import sys
sys.modules["transformer_engine"] = None
from megatron.core.parallel_state import RankGenerator
for tp, pp, cp, dp, ep, etp in eval(sys.argv[1]):
    edp = tp * cp * dp // (ep * etp)
    dense = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order="tp-cp-ep-dp-pp")
    expert = RankGenerator(tp=etp, ep=ep, dp=edp, pp=pp, cp=1, order="tp-cp-ep-dp-pp")
    print([{n: dense.get_ranks(n) for n in ("tp", "cp", "dp", "pp", "dp-cp", "tp-dp-cp", "tp-pp", "tp-cp")},
           {n: expert.get_ranks(n) for n in ("tp", "ep", "dp", "tp-ep", "tp-ep-pp")}])
"""
_EXPERT_NAMES = {"tp": "etp", "ep": "ep", "dp": "edp", "tp-ep": "etp_ep", "tp-ep-pp": "etp_ep_pp"}


@pytest.mark.full
def test_rank_order_is_megatrons() -> None:
    """Against megatron-core's own RankGenerator, in a process of its own: importing it takes seconds."""
    cases = [(2, 2, 2, 2, 2, 1), (4, 1, 1, 4, 4, 2), (1, 4, 2, 3, 1, 1)]
    command = [sys.executable, "-c", _WITNESS, repr(cases)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("[{")]
    for (tp, pp, cp, dp, ep, etp), line in zip(cases, lines, strict=True):
        sizes = ParallelSizes(tp, pp, cp, dp, expert=ep, expert_tensor=etp)
        dense, expert = ast.literal_eval(line)
        theirs = {name.replace("-", "_"): groups for name, groups in dense.items()}
        theirs |= {_EXPERT_NAMES[name]: groups for name, groups in expert.items()}
        for axis, groups in theirs.items():
            assert sorted(all_groups(sizes, axis)) == sorted(map(sorted, groups)), (sizes, axis)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tensor": 0}, ["tensor=0"]),
        ({"data": 4, "data_outer": 3}, ["data_outer=3", "data=4"]),
        ({"tensor": 2, "data": 2, "expert": 3}, ["expert=3", "expert_tensor=1", "4 ranks", "tensor=2"]),
        ({"data": 4, "data_outer": 4, "expert": 2}, ["data_outer=4", "expert-data size 2", "expert=2"]),
    ],
)
def test_sizes_that_do_not_fit_are_named(arguments: dict[str, int], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        ParallelSizes(**arguments)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_world_that_does_not_divide_is_named() -> None:
    with pytest.raises(ValueError, match=r"world size 6 .* tensor=4 .* multiple of 4"):
        ParallelSizes.of_world(6, tensor=4)
    assert ParallelSizes.of_world(24, tensor=2, context=3).data == 4
    with pytest.raises(ValueError, match="unknown axis 'dpp'"):
        ParallelSizes().size("dpp")
