"""pretrain_gpt.py as users start it: a run that trains, evaluates, saves and resumes; and runs that end badly.

Bad input is one clear line, naming the flag or file and the fix, and a non-zero status of every rank within seconds.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.pool import free_port
from tests.unit.train.jobs import TINY

ROOT = Path(__file__).resolve().parents[3]
LIMIT_SECONDS = 120


@dataclass
class Ended:
    """Exit statuses by rank, and what all ranks wrote to stdout and stderr."""

    codes: list[int]
    out: str
    err: str


def start(ranks: int, words: list[str]) -> list[subprocess.Popen[str]]:
    """The processes of a run, with torchrun's variables and without its start-up time."""
    port = str(free_port())
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "TORCHELASTIC"))
    }
    processes = []
    for rank in range(ranks):
        launch = {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, str(ROOT / "pretrain_gpt.py"), *words],
                env={**clean, **launch, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return processes


def finish(processes: list[subprocess.Popen[str]]) -> Ended:
    texts = []
    try:
        for process in processes:
            texts.append(process.communicate(timeout=LIMIT_SECONDS))
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    return Ended(codes, "".join(out for out, _ in texts), "".join(err for _, err in texts))


def test_train_evaluate_save_and_resume(tmp_path: Path) -> None:
    words = [
        *TINY,
        *f"--train-iters 4 --eval-interval 2 --save {tmp_path / 'save'} --load {tmp_path / 'save'}".split(),
        *f"--metrics-file {tmp_path / 'metrics.jsonl'} --tensorboard-dir {tmp_path / 'board'}".split(),
    ]
    first = finish(start(2, [*words, "--exit-interval", "2"]))
    assert first.codes == [0, 0], first.err
    assert "validation loss at iteration 2" in first.out
    assert "saved the checkpoint of iteration 2" in first.out
    second = finish(start(2, words))
    assert second.codes == [0, 0], second.err
    assert "loaded the checkpoint of iteration 2" in second.out
    assert "test loss at iteration 4" in second.out
    # A stranger sees no warnings that are not theirs to act on.
    assert first.err == second.err == ""
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines if "lm_loss" in line] == [1, 2, 3, 4]
    assert list((tmp_path / "board").iterdir())


BAD = {
    "batch sizes that do not divide": (
        "--train-iters 5 --global-batch-size 6",
        "--global-batch-size 6 is not a multiple of --micro-batch-size 2 x data-parallel size 2",
    ),
    "an unknown flag": (
        "--train-iters 5 --hiden-size 3",
        "unknown flag --hiden-size: did you mean --hidden-size?",
    ),
    "a missing corpus": ("--train-iters 5 --data-path /nowhere/corpus --split 1,0,0", "/nowhere/corpus"),
    "a bad schedule": ("--train-iters 5 --min-lr 1.0", "--min-lr"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(name: str) -> None:
    flags, message = BAD[name]
    words = [word for word in TINY if not (word == "--mock-data" and "--data-path" in flags)]
    ended = finish(start(2, [*words, *flags.split()]))
    assert all(code != 0 for code in ended.codes), ended
    lines = ended.err.strip().splitlines()
    assert lines and message in lines[0], ended.err
    assert set(lines) == {lines[0]}
    assert lines[0].startswith("error: ")


CRASH = """
import os, sys
sys.argv = ["pretrain_gpt.py", *{words!r}]
sys.path.insert(0, {root!r})
from megatron.train import loop, main
original = loop._Loop._report
def report(self, result):
    if self.run.launch.rank == 1 and self.progress.iteration == 2:
        raise RuntimeError("planted")
    original(self, result)
loop._Loop._report = report
main.main()
"""


def test_a_rank_that_crashes_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """O04: its traceback is there, the others say in one line that a rank has gone, nobody exits with 0."""
    program = tmp_path / "crash.py"
    program.write_text(CRASH.format(words=[*TINY, "--train-iters", "500"], root=str(ROOT)))
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "pretrain_gpt.py").write_text(program.read_text())
    begin = time.monotonic()
    ended = finish(start(2, []))
    assert time.monotonic() - begin < LIMIT_SECONDS
    assert ended.codes == [3, 1], ended.err
    assert "RuntimeError: planted" in ended.err
    assert "error: a rank has gone" in ended.err


def test_a_signal_saves_and_ends(tmp_path: Path) -> None:
    """One rank gets SIGTERM; both agree, save the same iteration and end well."""
    words = [
        *TINY,
        *f"--train-iters 100000 --exit-signal-handler --async-save --save {tmp_path / 'save'}".split(),
    ]
    processes = start(2, words)
    assert processes[0].stdout is not None
    for line in processes[0].stdout:
        if "iteration        2/" in line:
            break
    processes[1].send_signal(signal.SIGTERM)
    ended = finish(processes)
    assert ended.codes == [0, 0], ended.err
    assert "asked for it" in ended.out
    assert (tmp_path / "save" / "latest_checkpointed_iteration.txt").exists()
