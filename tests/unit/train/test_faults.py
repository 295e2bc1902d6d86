"""Faults planted in whole runs: what is said, which rank and place it names, how the run ends, and that it does.

Each run is two ranks of a tiny model, in processes of their own (tests/launch.py).
"""

from __future__ import annotations

import errno
import os
import pickle
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.launch import Ended, start
from tests.unit.train.jobs import TINY

QUIET = "--hidden-dropout 0 --attention-dropout 0 --train-iters 100000 --eval-iters 0".split()
WATCHED = ["--distributed-timeout-seconds-after-init", "4"]
LIMIT = 150.0


def run(plant: str, *words: str, ranks: int = 2) -> Ended:
    with start(ranks, [*TINY, *QUIET, *words], plant=f"{__name__}:{plant}") as started:
        return started.end(LIMIT)


def at_call(number: int, action: Callable[[], None]) -> Callable[[], None]:
    """Do something in the given call (from 1), and nothing in others."""
    calls = iter(range(1, 10**9))

    def count() -> None:
        if next(calls) == number:
            action()

    return count


def before(owner: object, name: str, action: Callable[[], None]) -> None:
    """Run `action` before each call of `owner.name`."""
    original = getattr(owner, name)

    def wrapped(*args: object, **kwargs: object) -> object:
        action()
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


# --- hangs ------------------------------------------------------------


def skip_a_collective(rank: int) -> None:
    """Rank 1 does not take part in the third gather of FSDP."""
    from megatron.fsdp.collectives import Communicator
    from megatron.fsdp.observe import Done

    original, calls = Communicator.all_gather, iter(range(1, 10**9))

    def all_gather(self: Communicator, *args: object) -> object:
        if rank == 1 and next(calls) == 3:
            for _ in args[0]:  # type: ignore[attr-defined]
                self.next_tag()  # else gloo takes the next gather for this one, and aborts where sizes differ
            return Done()
        return original(self, *args)  # type: ignore[arg-type]

    Communicator.all_gather = all_gather  # type: ignore[method-assign,assignment]


def test_a_skipped_collective_is_named(tmp_path: Path) -> None:
    """O08: both ranks show stacks and collectives; the one that differs is named; a trace is left."""
    trace = tmp_path / "trace"
    ended = run(
        "skip_a_collective",
        *WATCHED,
        *f"--data-parallel-sharding-strategy optim_grads_params --flight-recorder-dump-path {trace}".split(),
        "--flight-recorder-include-stack-trace",
    )
    assert ended.codes == [4, 4], ended.all_err
    for rank, text in enumerate(ended.err):
        assert f"[rank {rank}] watchdog: no progress for" in text
        assert "thread MainThread, most recent call last:" in text
        assert "ended last: " in text
    words = ended.err[0]
    assert "ranks differ: rank 0 launched all_gather #3 of group" in words, words
    assert "(ranks 0, 1)" in words and " for decoder." in words
    assert pickle.loads((tmp_path / "trace_1").read_bytes())["version"]


def stop_reading(rank: int) -> None:
    """Rank 1's data loader is stuck in its third batch."""
    from megatron.train import loop

    if rank == 1:
        before(loop, "local_batch", at_call(3, lambda: time.sleep(1000)))


def test_a_stuck_reader_is_told_from_a_collective() -> None:
    """The rank that waits for no collective is named, and where it is."""
    ended = run("stop_reading", *WATCHED)
    assert ended.codes == [4, 4], ended.all_err
    assert "rank 1 has not launched it" in ended.err[0], ended.err[0]
    assert "rank 1 waits for no collective: it is in training, iteration 2, at " in ended.err[0]
    assert "no collective is pending on this rank" in ended.err[1]
    assert "time.sleep(1000)" in ended.err[1]


def test_a_stopped_rank_is_named() -> None:
    """SIGSTOP: the other rank says who did not report, and ends."""
    with start(2, [*TINY, *QUIET, *WATCHED]) as started:
        started.wait_for("iteration        2/")
        started.signal(1, signal.SIGSTOP)
        ended = started.end(LIMIT, but=[1])
    assert ended.codes[0] == 4, ended.all_err
    assert "rank 1 did not report: stopped, or gone" in ended.err[0]
    assert "rank 0 waits for " in ended.err[0]


# --- crashes ------------------------------------------------------------


def mismatch(rank: int) -> None:
    """Rank 1's vector of numbers is longer, in the second step."""
    from megatron.train import step

    original = step.GradientStatistics.local
    calls = iter(range(1, 10**9))

    def local(self: step.GradientStatistics, *args: object) -> torch.Tensor:
        vector = original(self, *args)  # type: ignore[arg-type]
        longer = rank == 1 and next(calls) == 2
        return torch.cat([vector, torch.zeros(5, dtype=vector.dtype)]) if longer else vector

    step.GradientStatistics.local = local  # type: ignore[method-assign,assignment]


def test_mismatched_shapes_end_the_run() -> None:
    """gloo aborts the rank that receives too much, which shows where it was; the other one says that it has gone."""
    ended = run("mismatch", *WATCHED)
    assert all(code not in (0, None) for code in ended.codes), ended
    words = ended.all_err
    assert "Received data size doesn't match expected size" in words, words
    assert "Fatal Python error: Aborted" in words and " in _reduce" in words, words
    assert "a rank has gone" in words  # which one, the store would tell: rank 0, who aborted, held it


def raise_in_forward(rank: int) -> None:
    from megatron.models.gpt import GPTModel

    if rank == 1:
        before(GPTModel, "forward", at_call(3, planted))


def raise_in_backward(rank: int) -> None:
    if rank == 1:
        before(torch.Tensor, "backward", at_call(3, planted))


def raise_in_save(rank: int) -> None:
    from megatron.train.resume import RunSaver

    if rank == 1:
        before(RunSaver, "save", planted)


def planted() -> None:
    raise RuntimeError("planted")


@pytest.mark.parametrize("place", ["forward", "backward", "save"])
def test_an_exception_ends_all(place: str, tmp_path: Path) -> None:
    """O04: its traceback, with the place; the other rank ends too and says why; nobody exits with 0."""
    ended = run(f"raise_in_{place}", "--save", str(tmp_path), "--save-interval", "2", "--exit-interval", "50")
    assert ended.codes == [3, 1], ended.all_err
    assert ended.err[1].startswith("[rank 1] Traceback"), ended.err[1]
    assert "RuntimeError: planted" in ended.err[1]
    assert {"forward": "in _forward", "backward": "in _run_backward", "save": "in _save"}[place] in ended.err[
        1
    ]
    assert len(ended.err[0].splitlines()) == 1 and "its own message says why" in ended.err[0], ended.err[0]


def test_a_killed_rank_ends_all() -> None:
    with start(2, [*TINY, *QUIET, *WATCHED]) as started:
        started.wait_for("iteration        2/")
        started.signal(1, signal.SIGKILL)
        ended = started.end(LIMIT)
    assert ended.codes == [3, -signal.SIGKILL], ended.all_err
    (line,) = ended.err[0].splitlines()
    assert line.startswith("error: rank 1 has gone without a message: killed"), line


def test_a_killed_rank_ends_one_that_waits_for_nobody() -> None:
    """Of three ranks one is killed and one sleeps: the third names the killed one, and the sleeper ends too."""
    words = ["--global-batch-size", "6"]
    with start(3, [*TINY, *QUIET, *words], plant=f"{__name__}:sleep_on_rank_2") as started:
        started.wait_for("iteration        2/")
        started.signal(1, signal.SIGKILL)
        ended = started.end(LIMIT)
    assert ended.codes == [3, -signal.SIGKILL, 3], ended.all_err
    (line,) = ended.all_err.splitlines()
    assert line.startswith("error: rank 1 has gone without a message: killed"), line


def sleep_on_rank_2(rank: int) -> None:
    from megatron.train import loop

    if rank == 2:
        before(loop, "local_batch", at_call(4, lambda: time.sleep(1000)))


def block_gloo(rank: int) -> None:
    """Rank 1 fails while rank 0 is busy and would not notice."""
    from megatron.train import loop

    action = planted if rank == 1 else lambda: time.sleep(1000)
    before(loop, "local_batch", at_call(3, action))


def test_a_failure_ends_ranks_that_do_not_communicate() -> None:
    """The watchdog of a busy rank sees in the store that another failed."""
    ended = run("block_gloo")
    assert ended.codes == [3, 1], ended.all_err
    assert "error: rank 1 failed; its own message says why" in ended.err[0]
    assert ended.seconds < LIMIT / 2


def fill_the_disk(rank: int) -> None:
    from torch.distributed.checkpoint import filesystem

    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if rank == 1:
        before(filesystem, "_write_item", full)


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    """It names the rank and what is still good; both ranks end with the user's status."""
    ended = run("fill_the_disk", "--save", str(tmp_path), "--save-interval", "2")
    assert ended.codes == [2, 2], ended.all_err
    (line,) = ended.all_err.splitlines()
    assert line.startswith("error: --save ") and "rank 1: the disk is full" in line


def nan_on_one_rank(rank: int) -> None:
    from megatron.train import step

    original = step.masked_loss
    calls = iter(range(1, 10**9))

    def masked_loss(losses: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total, valid = original(losses, mask)
        bad = rank == 1 and next(calls) >= 4
        return (total * float("nan") if bad else total), valid

    step.TrainStep.__init__.__kwdefaults__["loss_function"] = masked_loss


def test_nan_on_one_rank_is_named() -> None:
    """X06: rank, microbatch and parameter, and that a second run of the step gave it again."""
    ended = run("nan_on_one_rank", "--global-batch-size", "8")
    assert ended.codes == [2, 2], ended.all_err
    (line,) = ended.all_err.splitlines()
    assert "the loss first goes wrong on rank 1, microbatch 1" in line, line
    assert "the gradient of " in line and "is not finite" in line
    assert "repeatable" in line
    assert "iteration        1/" in ended.out[0] and "iteration        2/" not in ended.out[0]


# --- no fault ------------------------------------------------------------


def test_a_signal_saves_and_ends(tmp_path: Path) -> None:
    """SIGTERM to one rank: all save the same iteration and end with 0."""
    words = [*TINY, *QUIET, *WATCHED, "--exit-signal-handler", "--async-save", "--save", str(tmp_path)]
    with start(2, words) as started:
        started.wait_for("iteration        2/")
        started.signal(1, signal.SIGTERM)
        ended = started.end(LIMIT)
    assert ended.codes == [0, 0], ended.all_err
    assert "asked for it" in ended.out[0]
    assert (tmp_path / "latest_checkpointed_iteration.txt").exists()


@pytest.mark.parametrize("steps", [100, pytest.param(1000, marks=pytest.mark.full)])
def test_there_is_no_false_alarm(steps: int) -> None:
    ended_words = ["--train-iters", str(steps), "--log-interval", "50", "--num-layers", "1"]
    with start(2, [*TINY, *QUIET, *ended_words, *WATCHED]) as started:
        ended = started.end(4 * LIMIT)
    assert ended.codes == [0, 0], ended.all_err
    assert ended.all_err == ""
