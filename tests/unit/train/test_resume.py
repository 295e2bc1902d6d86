"""Save and resume: 3 + 3 steps are 6 steps, bit for bit, and any layout loads what any other saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.train.checkpoint import MARKER, directory_of, latest_iteration, read_shapes
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
        (2, "--data-parallel-sharding-strategy optim_grads_params --bf16 --async-save --save-interval 1"),
        (3, "--data-parallel-sharding-strategy optim_grads --no-gradient-accumulation-fusion"),
        (2, "--pipeline-model-parallel-size 2 --data-parallel-sharding-strategy optim"),
        (
            2,
            "--expert-model-parallel-size 2 --num-experts 4 --moe-router-topk 2 --moe-input-jitter-eps 0.1 "
            "--moe-ffn-hidden-size 8 --moe-token-dispatcher-type alltoall "
            "--data-parallel-sharding-strategy optim_grads_params",
        ),
    ],
)
def test_three_and_three_steps_are_six(tmp_path: Path, ranks: int, flags: str) -> None:
    """K01, K07, K13, K16, K17: data order, dropout, router jitter, learning rate, optimizer and evaluation."""
    batch = 4 * ranks
    common = f"{flags} --global-batch-size {batch} --train-iters 6 --eval-interval 2 --lr-warmup-iters 2"
    six, three, rest = succeed(
        jobs(
            ranks,
            [
                f"{common} --save {tmp_path / 'six'}",
                f"{common} --exit-interval 3 --save {tmp_path}",
                f"{common} --load {tmp_path} --save {tmp_path}",
            ],
        )
    )
    assert six.series("learning_rate")[0] != six.series("learning_rate")[1]
    assert three.numbers + rest.numbers == six.numbers
    assert_equal_weights(rest, six)
    assert (tmp_path / MARKER).read_text() == "6"
    if "--async-save" in flags:  # K08: what is asked for and what is done are two lines
        asked, done = (f"{word} the checkpoint of iteration 3" for word in ("saving", "saved"))
        assert 0 <= three.text.index(asked) < three.text.index(done)


def test_dropout_masks_matter() -> None:
    """Otherwise the test above proves nothing about random states."""
    common = "--global-batch-size 4 --train-iters 2"
    with_dropout, without = succeed(jobs(1, [common, f"{common} --hidden-dropout 0 --attention-dropout 0"]))
    assert with_dropout.series("lm_loss") != without.series("lm_loss")


def test_any_layout_loads(tmp_path: Path) -> None:
    """I04, K05, K13, K17: saved by ZeRO-3 on 3 ranks, continued by every strategy on 2, the same samples and rates."""
    common = (
        "--hidden-dropout 0 --attention-dropout 0 --global-batch-size 12 --train-iters 4 --swiglu --ffn-hidden-size 24 "
        "--untie-embeddings-and-output-weights"
    )
    save = f"{common} --save {tmp_path} --exit-interval 2"
    whole, _ = succeed(jobs(3, [common, save]))
    load = f"{common} --load {tmp_path} --data-parallel-sharding-strategy"
    for resumed in succeed(jobs(2, [f"{load} {strategy}" for strategy in STRATEGIES])):
        assert resumed.series("learning_rate")[:2] == whole.series("learning_rate")[2:]
        assert resumed.series("lm_loss")[:2] == pytest.approx(whole.series("lm_loss")[2:], rel=1e-5)
        assert "random states belong to 3 ranks" in resumed.text
        for name, value in whole.weights.items():
            torch.testing.assert_close(resumed.weights[name], value, rtol=1e-3, atol=1e-4)


def test_finetune_takes_weights_only(tmp_path: Path) -> None:
    common = "--global-batch-size 4 --hidden-dropout 0 --attention-dropout 0"
    first, again, pretrained = succeed(
        jobs(
            1,
            [
                f"{common} --train-iters 2 --save {tmp_path}",
                f"{common} --train-iters 1 --load {tmp_path} --finetune --lr 0",
                f"{common} --train-iters 1 --load {tmp_path}/none --pretrained-checkpoint {tmp_path} --lr 0",
            ],
        )
    )
    for outcome in (again, pretrained):
        assert outcome.series("consumed_samples") == [4]
        assert_equal_weights(outcome, first)


def test_another_model_is_refused(tmp_path: Path) -> None:
    first, other, words = jobs(
        2,
        [
            f"--global-batch-size 4 --train-iters 1 --save {tmp_path}",
            f"--global-batch-size 4 --train-iters 2 --load {tmp_path} --swiglu --ffn-hidden-size 24 --num-layers 3",
            f"--global-batch-size 4 --train-iters 2 --load {tmp_path} --vocab-size 60",
        ],
    )
    assert first[0].error is None, first[0].error
    for outcome in other:
        assert outcome.users
        assert outcome.error is not None
        assert "--load: the checkpoint is of another model" in outcome.error
        assert "num_layers is 2 there, 3 here" in outcome.error
    for outcome in words:
        assert outcome.users and "vocab_size is" in str(outcome.error)


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


def test_three_steps_more_in_another_layout(tmp_path: Path) -> None:
    """K01: six steps, and three and three in other layouts, are one truth."""
    common = (
        "--hidden-dropout 0 --attention-dropout 0 --global-batch-size 8 --train-iters 6 --fp64 --swiglu "
        "--ffn-hidden-size 24 --num-layers 4 --init-method-std 0.2 --eval-iters 0"
    )
    tensor = f"{common} --tensor-model-parallel-size 2 --data-parallel-sharding-strategy optim_grads_params"
    pipeline = (
        f"{common} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
        "--data-parallel-sharding-strategy optim"
    )
    six, _, pipelined, sharded = succeed(
        jobs(
            4,
            [
                tensor,
                f"{tensor} --exit-interval 3 --save {tmp_path}",
                f"{pipeline} --load {tmp_path}",
                f"{common} --load {tmp_path} --data-parallel-sharding-strategy optim_grads",
            ],
        )
    )
    for rest in (pipelined, sharded):
        assert "random states belong to 4 ranks (tp 2, dp_shard 2), this run has 4 (" in rest.text
        for name in ("lm_loss", "grad_norm", "params_norm", "learning_rate"):
            assert rest.series(name) == pytest.approx(six.series(name)[3:], rel=1e-9), name


def test_the_end_of_time_saves(tmp_path: Path) -> None:
    """--exit-duration-in-mins: the step under way is finished and saved, and the save is waited for."""
    words = f"--global-batch-size 4 --train-iters 50 --exit-duration-in-mins 0 --async-save --save {tmp_path}"
    (run,) = succeed(jobs(1, [words]))
    assert "stopping after iteration 1: a signal or --exit-duration-in-mins asked for it" in run.text
    assert "saved the checkpoint of iteration 1 to" in run.text and (tmp_path / MARKER).read_text() == "1"


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    """The newest whole one before it, with a warning; the run ends as if nothing had happened."""
    common = f"--global-batch-size 4 --train-iters 4 --save-interval 1 --save {tmp_path}"
    (whole,) = succeed(jobs(1, [common]))
    path = directory_of(tmp_path, 4) / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    ((asked,), (resumed,)) = jobs(
        1, [f"{common} --load {tmp_path} --ckpt-step 4", f"{common} --load {tmp_path}"]
    )
    assert asked.users and f"{path} is damaged" in str(asked.error)
    assert resumed.error is None, resumed.error
    assert (
        f"warning: {path} is damaged: its content does not match its checksum: loading iteration 3"
        in resumed.text
    )
    assert resumed.numbers == whole.numbers[3:]
    assert_equal_weights(resumed, whole)


def test_checkpoints_that_the_next_replaces(tmp_path: Path) -> None:
    """--non-persistent-save-interval: one of them at a time, beside the others, and the newest of both is loaded."""
    intervals = "--save-interval 4 --non-persistent-save-interval 2"
    common = f"--global-batch-size 4 --train-iters 8 {intervals} --save {tmp_path}"
    (whole,) = succeed(jobs(1, [common]))
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000004", "iter_0000008"]
    others = tmp_path / "non_persistent"
    assert [path.name for path in others.glob("iter_*")] == ["iter_0000006"] and latest_iteration(others) == 6
    (tmp_path / MARKER).write_text("4")
    elsewhere = f"{common} --load {tmp_path} --non-persistent-global-ckpt-dir {tmp_path / 'elsewhere'}"
    newest, other = succeed(jobs(1, [f"{common} --load {tmp_path}", f"{elsewhere} --ckpt-step 4"]))
    assert newest.numbers == whole.numbers[6:]
    assert other.numbers == whole.numbers[4:]
    assert latest_iteration(tmp_path / "elsewhere") == 6


def test_parts_that_are_left_out(tmp_path: Path) -> None:
    """Of the file, or in it: each changes the steps that follow, and nothing else."""
    common = "--global-batch-size 4 --train-iters 4"
    six, _, _, no_optimizer, no_rng, both_there, left = succeed(
        jobs(
            1,
            [
                common,
                f"{common} --exit-interval 2 --save {tmp_path / 'all'}",
                f"{common} --exit-interval 2 --save {tmp_path / 'weights'} --no-save-optim --no-save-rng",
                f"{common} --load {tmp_path / 'all'} --no-load-optim --dist-ckpt-strictness raise_all",
                f"{common} --load {tmp_path / 'all'} --no-load-rng",
                f"{common} --load {tmp_path / 'all'} --dist-ckpt-strictness raise_all",
                f"{common} --load {tmp_path / 'weights'} --no-load-rng",
            ],
        )
    )
    assert both_there.numbers == six.numbers[2:]
    assert no_optimizer.series("lm_loss")[0] == six.series("lm_loss")[2]
    assert no_optimizer.series("lm_loss")[1] != six.series("lm_loss")[3]
    assert no_rng.series("lm_loss")[0] != six.series("lm_loss")[2]
    assert left.series("lm_loss")[0] == no_rng.series("lm_loss")[0]
    assert left.series("lm_loss")[1] != no_rng.series("lm_loss")[1]
    names = {name.split(".")[0] for name in read_shapes(tmp_path / "weights", 2)}
    assert names == {"model"}
