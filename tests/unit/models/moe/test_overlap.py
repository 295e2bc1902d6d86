"""Expert traffic behind another microbatch's compute, or the shared expert's: not one bit of the results changes.

Fault replay: E16 (one order of collectives on all ranks, with microbatches that take turns).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from megatron.models.config import ModelConfig
from megatron.parallel.interleave import Interleaver
from megatron.train.arguments import parse_args, validate
from megatron.train.build import step_options
from tests.pool import run_ranks
from tests.unit.models.moe import shapes
from tests.unit.models.moe.training import Layout, Options, Trace, assert_one_order, recorded, train

EP2 = Layout({"data": 2, "expert": 2})
TENSOR = Layout({"tensor": 2, "data": 1, "expert": 2}, True)
"""Four microbatches a rank."""
OVERLAP, DELAY = {"overlap": True}, {"delay": True}


def mixtral(**changes: Any) -> ModelConfig:
    return shapes.mixtral(dispatcher="alltoall", **changes)


def deepseek(**changes: Any) -> ModelConfig:
    return shapes.deepseek(dispatcher="alltoall", **changes)


CASES: dict[str, tuple[ModelConfig, ModelConfig, Layout, Options, dict[str, bool]]] = {
    # model without, model with, layout, options without, what the options with have
    "zero3": (mixtral(), mixtral(), EP2, Options("optim_grads_params"), OVERLAP),
    "no-shard-unfused": (mixtral(), mixtral(), EP2, Options("no_shard", fused=False), OVERLAP | DELAY),
    "zero2-per-token": (deepseek(), deepseek(), EP2, Options("optim_grads", per_token=True), OVERLAP),
    "four-microbatches": (
        deepseek(),
        deepseek(shared_expert_overlap=True),
        TENSOR,
        Options("optim_grads_params"),
        OVERLAP | DELAY,
    ),
    "only-delayed": (mixtral(), mixtral(), EP2, Options("optim_grads_params"), DELAY),
    "only-delayed-recomputed": (
        deepseek(),
        deepseek(),
        TENSOR,
        Options("optim", fused=False, recompute="full"),
        DELAY,
    ),
}


def both(rank: int, world: int, name: str) -> tuple[Trace, Trace, list[list[str]]]:
    """Traces without and with overlap, and the switches of each pair."""
    plain, overlapped, layout, options, changes = CASES[name]
    without = train(rank, world, plain, layout, options)[0]
    pairs: list[list[str]] = []
    run = Interleaver.run

    def watched(self: Interleaver, *functions: Any) -> Any:
        result = run(self, *functions)
        pairs.append([side.value for side in self.switches])
        return result

    Interleaver.run = watched
    try:
        with_overlap = train(rank, world, overlapped, layout, dataclasses.replace(options, **changes))[0]
    finally:
        Interleaver.run = run
    return without, with_overlap, pairs


@pytest.mark.parametrize("name", CASES)
def test_results_are_equal_to_the_bit(name: str) -> None:
    config, _, layout, _, changes = CASES[name]
    assert config.moe is not None
    layers = config.moe.num_layers + (config.mtp.num_layers if config.mtp else 0)
    for want, got, pairs in run_ranks(both, layout.world, name, timeout=120):
        assert got.losses == want.losses and got.norms == want.norms and got.auxiliary == want.auxiliary
        for ours, theirs in zip(
            [*got.gradients, got.weights, got.buffers],
            [*want.gradients, want.weights, want.buffers],
            strict=True,
        ):
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
        assert len(pairs) == ("overlap" in changes) * 2 * (layout.microbatches - 1)  # of two steps
        for switches in pairs:  # at each way of the tokens, forth and back: in turns throughout
            assert switches == ["forward", "backward"] * (2 * layers)


def test_ranks_launch_in_one_order() -> None:
    """E16, with microbatches that take turns."""
    logs = run_ranks(recorded, 2, mixtral(), EP2, Options(overlap=True), timeout=120)
    assert_one_order(logs)


RUN = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --train-iters 1 "
    "--lr 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 64 --num-experts 4 --attention-dropout 0 "
    "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --overlap-moe-expert-parallel-comm "
)


def test_the_flag() -> None:
    assert step_options(validate(parse_args(RUN.split()), 2, "cpu")).overlap_experts
    assert not step_options(
        validate(parse_args(RUN.replace("--overlap-moe-expert-parallel-comm", "").split()), 2, "cpu")
    ).overlap_experts


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--moe-token-dispatcher-type allgather", "--moe-token-dispatcher-type alltoall"),
        ("--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 1"),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            "not recomputed",
        ),
        ("--recompute-granularity selective --recompute-modules moe", "not recomputed"),
    ],
)
def test_what_it_needs(words: str, expected: str) -> None:
    with pytest.raises(ValueError, match="--overlap-moe-expert-parallel-comm needs .*" + expected):
        validate(parse_args((RUN + words).split()), 4, "cpu")
