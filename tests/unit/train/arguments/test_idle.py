"""What is given and read by nothing in a run is named, with what it waits for."""

from __future__ import annotations

import pytest

from megatron.train.arguments import parse_args, validate
from megatron.train.arguments.idle import IDLE
from megatron.train.arguments.tables import flags
from megatron.train.config import TrainConfig

RUN = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 1 --global-batch-size 2 --train-iters 1 --lr 1e-3 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 62"
)
ZERO3 = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"


def config(words: str, world: int = 1) -> TrainConfig:
    return validate(parse_args(f"{RUN} {words}".split()), world, "cpu")


@pytest.mark.parametrize(
    ("words", "needed", "line"),
    [
        (
            "--moe-router-topk 1 --moe-ffn-hidden-size 8",
            "--num-experts 4",
            "have no effect without --num-experts",
        ),
        ("--fsdp-double-buffer", ZERO3, "has no effect without --data-parallel-sharding-strategy"),
        ("--hysteresis 3", "--fp16", "--hysteresis 3 has no effect without --fp16"),
        ("--mtp-loss-scaling-factor 0.2", "--mtp-num-layers 1", "has no effect without --mtp-num-layers"),
        ("--sgd-momentum 0.5", "--optimizer sgd", "has no effect without --optimizer sgd"),
        ("--q-lora-rank 8", "--multi-latent-attention", "has no effect without --multi-latent-attention"),
        ("--manual-gc-interval 3", "--manual-gc", "--manual-gc-interval 3 has no effect without --manual-gc"),
        ("--tensorboard-queue-size 3", "--tensorboard-dir x", "has no effect without --tensorboard-dir"),
        ("--use-pytorch-profiler", "--profile", "has no effect without --profile"),
        (
            "--cp-comm-type a2a",
            "--context-parallel-size 2 --attention-dropout 0",
            "without --context-parallel-size 2 or more",
        ),
    ],
)
def test_idle_flags_are_named(words: str, needed: str, line: str) -> None:
    assert any(line in warning for warning in config(words).warnings)
    rope = " --position-embedding-type rope" if "mtp" in needed or "latent" in needed else ""
    rest = config(f"{words} {needed}{rope}", 2).warnings
    assert not any(line in warning for warning in rest), rest


def test_what_needs_a_device_is_named_without_one() -> None:
    words = f"{RUN} --record-memory-history --transformer-impl local".split()
    line = "--record-memory-history has no effect without a CUDA device"
    assert line in validate(parse_args(words), 1, "cpu").warnings
    assert line not in validate(parse_args(words), 1, "cuda").warnings


def test_a_default_that_is_spelled_out_is_no_news() -> None:
    assert config("--hysteresis 2 --adam-beta1 0.9").warnings == ()


def test_the_table_names_flags_that_are_read() -> None:
    by_name = {flag.name: flag for flag in flags()}
    for row in IDLE:
        names = () if isinstance(row.flags, str) else row.flags
        assert row.members() and len(row.members()) >= len(names)
        assert all(by_name[name].status == "works" for name in names), row
