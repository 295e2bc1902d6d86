"""Runs of two ranks that are killed at random times and started again, for test_kill.py.

    python -m tests.unit.train.checkpoint.killed_runs FOLDER KILLS SEED

One process imports everything once and forks the ranks of every attempt. A run that ends is compared with one that was
never killed; then its folder is emptied and the next begins, until there were enough kills. Prints one JSON line.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.train.checkpoint import ChoiceOptions, faults, find_checkpoint, latest_iteration
from megatron.train.checkpoint.files import existing_directory
from megatron.train.loop import train
from megatron.train.report import build_reporter
from tests.unit.train.jobs import build

WORLD = 2
ITERATIONS = 12
WORDS = (
    f"--train-iters {ITERATIONS} --global-batch-size 4 --eval-interval 100 --eval-iters 0 "
    "--data-parallel-sharding-strategy optim_grads_params"
).split()
SAVING = "--async-save --save-interval 1 --save-retain-interval 4 --save {0} --load {0}"
PATIENCE_SECONDS = 300.0
GRACE_SECONDS = 5.0
"""For the peers of a killed rank: one that waits for it at the rendezvous would not notice."""


@dataclass
class Attempts:
    """What happened: kills, kills after which there was a checkpoint, runs that ended, and what was wrong."""

    kills: int = 0
    resumed: int = 0
    ended: int = 0
    errors: list[str] = field(default_factory=list)


def rank_main(rank: int, words: list[str], folder: Path) -> int:
    """One rank of one attempt; returns its exit status. The first leaves its log and, at the end, the whole weights."""
    try:
        store = dist.FileStore(str(folder / "store"), WORLD)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
        run = build(rank, WORLD, words)
        with open(folder / f"log{rank}", "w", buffering=1) as log:
            train(run, build_reporter(run, log))
        weights = {name: one.full_tensor() for name, one in run.state.model.named_parameters()}  # type: ignore[attr-defined]
        if rank == 0:
            torch.save(weights, folder / "weights")
        return 0
    except Exception:
        (folder / f"error{rank}").write_text(traceback.format_exc())
        return 1


def start(words: list[str], folder: Path) -> list[int]:
    """Process ids of the ranks of a new attempt."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    pids = []
    for rank in range(WORLD):
        pid = os.fork()
        if pid == 0:
            os._exit(rank_main(rank, words, folder))
        pids.append(pid)
    return pids


def wait(pids: list[int], seconds: float) -> dict[int, int]:
    """Statuses of those that ended within `seconds`; returns as soon as all have."""
    ended: dict[int, int] = {}
    deadline = time.monotonic() + seconds
    while len(ended) < len(pids) and time.monotonic() < deadline:
        for pid in pids:
            if pid not in ended and os.waitpid(pid, os.WNOHANG)[0]:
                ended[pid] = pid
        time.sleep(0.002)
    return ended


def end(pids: list[int], ended: dict[int, int], seconds: float = GRACE_SECONDS) -> None:
    """Wait for the peers of a killed rank, and kill those that do not notice, as a launcher does."""
    left = [pid for pid in pids if pid not in ended]
    noticed = wait(left, seconds)
    for pid in left:
        if pid not in noticed:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def same_weights(one: Path, other: Path) -> bool:
    """Whether two runs ended with the same bits."""
    left, right = torch.load(one), torch.load(other)
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def check_after_kill(root: Path, finished: int, result: Attempts) -> int:
    """Nothing that was finished is lost: returns the iteration that the next attempt must load, 0 for none."""
    found = find_checkpoint(root, ChoiceOptions())
    iteration = 0 if found is None else found.iteration
    marked = latest_iteration(root) or 0
    if iteration < max(finished, marked):
        result.errors.append(f"iteration {finished} was finished, {iteration} is left: {found}")
    if iteration:
        result.resumed += 1
        result.errors += faults(existing_directory(root, iteration), contents=True)
    return iteration


def check_loaded(attempt: Path, iteration: int, result: Attempts) -> None:
    """The attempt began where the last one left off."""
    text = (attempt / "log0").read_text() if (attempt / "log0").exists() else ""
    if "iteration " in text and iteration and f"loaded the checkpoint of iteration {iteration} " not in text:
        result.errors.append(f"iteration {iteration} was not loaded: {text[:300]}")


def main(folder: Path, kills: int, seed: int) -> Attempts:
    """Kill `kills` times and compare every run that ends with one that was never killed."""
    chance, result = random.Random(seed), Attempts()
    begin = time.monotonic()
    reference = folder / "reference"
    saving = SAVING.format(folder / "plain").split()
    pids = start([*WORDS, *saving], reference)
    end(pids, {}, PATIENCE_SECONDS)
    duration = time.monotonic() - begin
    root, attempt, number, iteration = folder / "save", folder / "attempt", 0, 0
    words, killing = [*WORDS, *SAVING.format(root).split()], True
    while not result.errors and (killing or iteration or not result.ended):
        number += 1
        pids = start(words, attempt)
        ended = wait(pids, chance.uniform(0.0, duration * (1 + number / 10)) if killing else PATIENCE_SECONDS)
        if len(ended) == WORLD:
            check_loaded(attempt, iteration, result)
            if not (attempt / "weights").exists():
                result.errors.append("".join(path.read_text() for path in attempt.glob("error*")))
            elif not same_weights(attempt / "weights", reference / "weights"):
                result.errors.append(f"attempt {number} ended with other weights")
            result.ended += 1
            shutil.rmtree(root)
            iteration = 0
            continue
        victim = chance.choice([pid for pid in pids if pid not in ended])
        os.kill(victim, signal.SIGKILL)
        end(pids, ended)
        result.kills += killing
        if not killing:
            result.errors.append("an attempt did not end")
        check_loaded(attempt, iteration, result)
        iteration = check_after_kill(root, iteration, result)
        # All kills may have come before the first save.
        killing = result.kills < kills or not result.resumed
    return result


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(vars(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))))
