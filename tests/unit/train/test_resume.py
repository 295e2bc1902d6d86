"""Save and resume: 3 + 3 steps are 6 steps, bit for bit, and any layout loads what any other saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.train.checkpoint import MARKER
from tests.pool import run_ranks
from tests.unit.train.jobs import Outcome, run_jobs

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


def jobs(ranks: int, lists: list[str]) -> list[list[Outcome]]:
    """Outcomes of the jobs, by job and rank."""
    by_rank = run_ranks(run_jobs, ranks, [words.split() for words in lists], timeout=180)
    return [list(outcomes) for outcomes in zip(*by_rank, strict=True)]


def assert_equal_weights(one: Outcome, other: Outcome) -> None:
    assert one.weights.keys() == other.weights.keys()
    for name in one.weights:
        assert torch.equal(one.weights[name], other.weights[name]), name


def succeed(outcomes: list[list[Outcome]]) -> list[Outcome]:
    for job in outcomes:
        for outcome in job:
            assert outcome.error is None, outcome.error
    return [job[0] for job in outcomes]


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (1, "--data-parallel-sharding-strategy no_shard"),
        (2, "--data-parallel-sharding-strategy optim --optimizer sgd"),
        (2, "--data-parallel-sharding-strategy optim_grads_params --bf16"),
        (3, "--data-parallel-sharding-strategy optim_grads --no-gradient-accumulation-fusion"),
    ],
)
def test_three_and_three_steps_are_six(tmp_path: Path, ranks: int, flags: str) -> None:
    """K01, K13, K16, K17: data order, dropout, learning rate, optimizer and evaluation, with dropout on."""
    batch = 4 * ranks
    common = f"{flags} --global-batch-size {batch} --train-iters 6 --eval-interval 2 --lr-warmup-iters 2"
    six, three, rest = succeed(
        jobs(
            ranks,
            [
                common,
                f"{common} --exit-interval 3 --save {tmp_path}",
                f"{common} --load {tmp_path} --save {tmp_path}",
            ],
        )
    )
    assert six.series("learning_rate")[0] != six.series("learning_rate")[1]
    assert three.numbers + rest.numbers == six.numbers
    assert_equal_weights(rest, six)
    assert (tmp_path / MARKER).read_text() == "6"


def test_dropout_masks_matter() -> None:
    """Otherwise the test above proves nothing about random states."""
    common = "--global-batch-size 4 --train-iters 2"
    with_dropout, without = succeed(jobs(1, [common, f"{common} --hidden-dropout 0 --attention-dropout 0"]))
    assert with_dropout.series("lm_loss") != without.series("lm_loss")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_any_layout_loads(tmp_path: Path, strategy: str) -> None:
    """I04, K05, K13, K17: saved by ZeRO-3 on 3 ranks, continued by every strategy on 2, the same samples and rates."""
    common = (
        "--hidden-dropout 0 --attention-dropout 0 --global-batch-size 12 --train-iters 4 --swiglu --ffn-hidden-size 24 "
        "--untie-embeddings-and-output-weights"
    )
    save = f"{common} --save {tmp_path} --exit-interval 2"
    whole, _ = succeed(jobs(3, [common, save]))
    (resumed,) = succeed(
        jobs(2, [f"{common} --load {tmp_path} --data-parallel-sharding-strategy {strategy}"])
    )
    assert resumed.series("learning_rate")[:2] == whole.series("learning_rate")[2:]
    assert resumed.series("lm_loss")[:2] == pytest.approx(whole.series("lm_loss")[2:], rel=1e-5)
    assert "random states belong to 3 ranks" in resumed.text
    for name, value in whole.weights.items():
        torch.testing.assert_close(resumed.weights[name], value, rtol=1e-3, atol=1e-4)


def test_finetune_takes_weights_only(tmp_path: Path) -> None:
    common = "--global-batch-size 4 --hidden-dropout 0 --attention-dropout 0"
    first, again = succeed(
        jobs(
            1,
            [
                f"{common} --train-iters 2 --save {tmp_path}",
                f"{common} --train-iters 1 --load {tmp_path} --finetune --lr 0",
            ],
        )
    )
    assert again.series("consumed_samples") == [4]
    assert_equal_weights(again, first)


def test_another_model_is_refused(tmp_path: Path) -> None:
    first, other = jobs(
        2,
        [
            f"--global-batch-size 4 --train-iters 1 --save {tmp_path}",
            f"--global-batch-size 4 --train-iters 2 --load {tmp_path} --swiglu --ffn-hidden-size 24 --num-layers 3",
        ],
    )
    assert first[0].error is None, first[0].error
    for outcome in other:
        assert outcome.users
        assert outcome.error is not None
        assert "--load: the checkpoint is of another model" in outcome.error
        assert "num_layers is 2 there, 3 here" in outcome.error


def test_another_schedule_needs_a_word(tmp_path: Path) -> None:
    """K11"""
    save = f"--global-batch-size 4 --train-iters 2 --save {tmp_path}"
    resume = f"--global-batch-size 4 --train-iters 4 --load {tmp_path}"
    _, refused, override = jobs(1, [save, resume, f"{resume} --override-opt-param-scheduler"])
    assert refused[0].users and "decay_samples 8 in the checkpoint, 16 here" in str(refused[0].error)
    assert override[0].error is None
    assert override[0].series("consumed_samples") == [12, 16]


def test_nothing_to_load(tmp_path: Path) -> None:
    fresh, strict = jobs(
        1,
        [
            f"--global-batch-size 4 --train-iters 1 --load {tmp_path}",
            f"--global-batch-size 4 --train-iters 1 --load {tmp_path} --exit-on-missing-checkpoint",
        ],
    )
    assert fresh[0].error is None and "holds no checkpoint yet" in fresh[0].text
    assert strict[0].users and MARKER in str(strict[0].error)
