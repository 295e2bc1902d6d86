"""Faults that come back and faults that pass: told apart, located, counted; spikes are reported and end nothing."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch

from megatron.train.rerun import Guard, RandomState, RerunOptions, Window
from tests.pool import run_ranks
from tests.unit.train.jobs import Outcome, run_jobs

QUIET = "--global-batch-size 8 --train-iters 4 --eval-iters 0"  # with dropout: a second run needs the random state


def test_a_window_gives_its_batches_again() -> None:
    drawn = iter(range(10))
    window = Window(drawn)
    first = iter(window)
    assert [next(first), next(first)] == [0, 1]
    again = iter(window)
    assert [next(again), next(again)] == [0, 1]
    assert next(drawn) == 2  # nothing was read ahead


def test_random_state_comes_back() -> None:
    state = RandomState(torch.device("cpu"), None)
    first = torch.rand(3)
    state.restore()
    assert torch.equal(first, torch.rand(3))


def test_what_cannot_be_right() -> None:
    guard = Guard(RerunOptions("validate_results", spiky_loss=True, large_grads=True))
    assert guard.look(1000.0, 1000.0) is None  # nothing is known yet
    guard.accept(2.0, 1.0)
    guard.accept(math.nan, 1.0)
    assert guard.look(19.0, 9.0) is None
    spiky, large, fatal = guard.look(21.0, 1.0), guard.look(2.0, 11.0), guard.look(2.0, math.inf)
    assert spiky is not None and "loss of 21 is above 10 times" in spiky.text and not spiky.fatal
    assert large is not None and "gradient norm of 11" in large.text and not large.fatal
    assert fatal is not None and fatal.fatal
    assert Guard(RerunOptions("validate_results")).look(1e9, 1e9) is None


def test_injected_faults_are_told_apart(tmp_path: Path) -> None:
    """A transient fault passes and changes nothing; a persistent one stops the run; two runs give the same bits."""
    tracker = tmp_path / "faults.jsonl"
    injected = f"{QUIET} --error-injection-rate 2 --result-rejected-tracker-filename {tracker}"
    plain, transient, persistent, twice = _jobs(
        QUIET,
        injected,
        f"{injected} --error-injection-type persistent_error",
        f"{QUIET} --rerun-mode report_stats",
    )
    assert plain.error is transient.error is twice.error is None, (transient.error, twice.error)
    assert plain.numbers == transient.numbers == twice.numbers
    assert "It is passing: " in transient.text and "suspect their devices" in transient.text
    assert "microbatch 0. It is passing" in transient.text
    assert "a second run differs by 0" in twice.text and "on ranks" not in twice.text
    assert persistent.error is not None and persistent.users
    assert "It is repeatable: a second run of the step gave it again" in persistent.error
    found = [json.loads(line) for line in tracker.read_text().splitlines()]
    assert found[-1]["passed"] is False and found[0]["passed"] is True and found[0]["ranks_that_differ"]


def test_a_spike_names_rank_microbatch_and_parameter() -> None:
    """A learning rate that explodes: reported, repeatable, and the run goes on."""
    words = f"{QUIET} --lr 300 --min-lr 0 --clip-grad 0 --check-for-spiky-loss --no-check-for-nan-in-loss-and-grad"
    (outcome,) = _jobs(words)
    assert outcome.error is None
    (line, *_) = [line for line in outcome.text.splitlines() if "fault: the loss of" in line]
    assert "the largest loss is" in line and "microbatch" in line and "the largest gradient that of " in line
    assert line.endswith("It is repeatable: a second run of the step gave it again")


def _jobs(*lists: str) -> list[Outcome]:
    return run_ranks(run_jobs, 2, [words.split() for words in lists], timeout=150)[0]


def test_a_step_run_again_counts_its_tokens_once() -> None:
    """The loss over a step's tokens so far begins anew, as all that a step counts: a rerun step equals a plain one."""
    common = (
        "--global-batch-size 4 --micro-batch-size 1 --train-iters 3 --eval-iters 0 --num-experts 4 --moe-router-topk 2 "
        "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 10 --disable-bias-linear "
        "--moe-token-dispatcher-type alltoall --data-parallel-sharding-strategy optim --init-method-std 0.5 "
        "--rerun-mode"
    )
    plain, again = run_ranks(
        run_jobs, 2, [f"{common} {mode}".split() for mode in ("disabled", "report_stats")]
    )[0]
    assert plain.error is None and again.error is None
    assert len(again.numbers) == 3 and again.numbers == plain.numbers
