"""What the loop does beside steps: skipped batches, endings, ramps of the batch, profiles; on one rank."""

from __future__ import annotations

import contextlib
import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron.train.loop import _Loop
from tests.pool import run_ranks
from tests.unit.train.data.corpora import write_corpus
from tests.unit.train.jobs import Outcome, run_jobs

QUIET = "--hidden-dropout 0 --attention-dropout 0 --global-batch-size 4"


def jobs(*lists: str, ranks: int = 1) -> list[Outcome]:
    outcomes = run_ranks(run_jobs, ranks, [words.split() for words in lists], timeout=120)[0]
    for outcome in outcomes:
        assert outcome.error is None, outcome.error
    return outcomes


def test_the_loss_falls() -> None:
    (outcome,) = jobs(f"{QUIET} --train-iters 30 --lr 0.03 --log-interval 10")
    losses = outcome.series("lm_loss")
    assert len(losses) == 3
    assert losses[-1] < losses[0] - 0.3


def test_skipped_iterations_read_their_batch() -> None:
    """--iterations-to-skip: the data go on as if the step had been made; nothing else moves."""
    plain, skipping = jobs(
        f"{QUIET} --train-iters 3 --lr 0 --min-lr 0 --weight-decay 0",
        f"{QUIET} --train-iters 3 --lr 0 --min-lr 0 --weight-decay 0 --iterations-to-skip 2",
    )
    assert plain.series("lm_loss")[::2] == skipping.series("lm_loss")
    assert skipping.series("consumed_samples") == [4, 12]


def test_the_batch_ramps_up() -> None:
    """--rampup-batch-size 4 4 8: samples and the learning rate follow the batch."""
    (outcome,) = jobs(
        "--hidden-dropout 0 --attention-dropout 0 --global-batch-size 12 --rampup-batch-size 4 4 8 "
        "--train-samples 40"
    )
    samples = outcome.series("consumed_samples")
    assert samples[:3] == [4, 12, 24]
    assert all(b - a in (4, 8, 12) for a, b in pairwise(samples))


def test_no_training_only_evaluation(tmp_path: Path) -> None:
    trained, evaluated = jobs(
        f"{QUIET} --train-iters 2 --save {tmp_path}",
        f"{QUIET} --train-iters 2 --load {tmp_path} --skip-train",
    )
    assert evaluated.series("lm_loss") == []
    assert len(evaluated.series("lm_loss_test")) == 1
    assert evaluated.series("lm_loss_test") == trained.series("lm_loss_test")


def test_a_duration_ends_the_run(tmp_path: Path) -> None:
    (outcome,) = jobs(f"{QUIET} --train-iters 100000 --exit-duration-in-mins 0 --save {tmp_path}")
    assert outcome.series("consumed_samples") == [4]
    assert "stopping after iteration 1" in outcome.text
    assert (tmp_path / "iter_0000001").is_dir()


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_recompute_and_garbage_collection_change_nothing(strategy: str) -> None:
    """F01: full recompute under FSDP gives the same bits, dropout included."""
    common = f"--global-batch-size 4 --train-iters 3 --data-parallel-sharding-strategy {strategy}"
    plain, recomputed = jobs(
        common,
        f"{common} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --manual-gc "
        "--manual-gc-interval 1",
        ranks=2,
    )
    assert plain.numbers == recomputed.numbers


def test_a_profile_is_written(tmp_path: Path) -> None:
    jobs(
        f"{QUIET} --train-iters 3 --profile --profile-step-start 2 --profile-step-end 3 --use-pytorch-profiler "
        f"--tensorboard-dir {tmp_path}"
    )
    (trace,) = tmp_path.glob("trace_rank0.json")
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"train.forward", "train.backward", "train.optimizer"} <= names


def test_validation_does_not_move_training() -> None:
    """Dropout and data order are the same with and without evaluations in between."""
    without, with_evaluation = jobs(
        "--global-batch-size 4 --train-iters 3 --eval-iters 0",
        "--global-batch-size 4 --train-iters 3 --eval-interval 1",
    )
    assert without.series("lm_loss") == with_evaluation.series("lm_loss")
    assert len(with_evaluation.series("lm_loss_validation")) == 3


def test_evaluation_begins_where_it_is_to() -> None:
    (outcome,) = jobs(
        "--global-batch-size 4 --train-iters 4 --eval-interval 1 --start-eval-at-iter 3 --eval-iters 1"
    )
    evaluated = [line["iteration"] for line in outcome.numbers if "lm_loss_validation" in line]
    assert evaluated == [3, 4]


def test_the_test_set_has_its_own_path(tmp_path: Path) -> None:
    """Only what is measured on it changes."""
    prefixes = [
        write_corpus(tmp_path / name, [[token] * 40 for token in range(first, first + 12)])
        for name, first in (("one", 1), ("two", 15))
    ]
    common = f"{QUIET} --train-iters 2 --eval-iters 1 --train-data-path {prefixes[0]} --valid-data-path {prefixes[0]}"
    same, other = jobs(*(f"{common} --test-data-path {prefix}" for prefix in prefixes))
    assert same.series("lm_loss") == other.series("lm_loss")
    assert same.series("lm_loss_validation") == other.series("lm_loss_validation") != []
    assert same.series("lm_loss_test") != other.series("lm_loss_test")


@pytest.mark.parametrize("level", [0, 1])
def test_unused_memory_is_given_back_where_asked(monkeypatch: pytest.MonkeyPatch, level: int) -> None:
    seen: list[str] = []
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: seen.append("emptied"))
    config = SimpleNamespace(
        empty_unused_memory_level=level, manual_gc=False, eval_interval=None, save=None,
        check_weight_hash_across_dp_replicas_interval=None,
    )  # fmt: skip
    loop = SimpleNamespace(
        progress=SimpleNamespace(iteration=1), config=config, reporter=None, _tell_saved=lambda: None,
        run=SimpleNamespace(device=torch.device("cuda")), _reason_to_stop=lambda: None,
    )  # fmt: skip
    with contextlib.suppress(AttributeError):  # what follows is not this test's
        _Loop._after_iteration(loop, None)  # type: ignore[arg-type]
    assert seen == ["emptied"] * level
