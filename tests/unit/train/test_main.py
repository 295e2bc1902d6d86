"""pretrain_gpt.py as users start it: a run that trains, evaluates, saves and resumes; and runs that end badly.

Bad input is one clear line, naming the flag or file and the fix, and a non-zero status of every rank within seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import launch
from tests.pool import free_port
from tests.unit.train.jobs import TINY

ROOT = Path(__file__).resolve().parents[3]
LIMIT_SECONDS = 120


def test_train_evaluate_save_and_resume(tmp_path: Path) -> None:
    words = [
        *TINY,
        *f"--train-iters 4 --eval-interval 2 --save {tmp_path / 'save'} --load {tmp_path / 'save'}".split(),
        *f"--metrics-file {tmp_path / 'metrics.jsonl'} --tensorboard-dir {tmp_path / 'board'}".split(),
    ]
    with launch.start(2, [*words, "--exit-interval", "2"]) as run:
        first = run.end(LIMIT_SECONDS)
    with launch.start(2, words) as run:
        second = run.end(LIMIT_SECONDS)
    # A stranger sees no warnings that are not theirs to act on.
    assert first.codes == second.codes == [0, 0] and first.all_err == second.all_err == ""
    assert "validation loss at iteration 2" in first.out[0]
    assert "saved the checkpoint of iteration 2" in first.out[0]
    assert "loaded the checkpoint of iteration 2" in second.out[0]
    assert "test loss at iteration 4" in second.out[0]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines if "lm_loss" in line] == [1, 2, 3, 4]
    assert list((tmp_path / "board").iterdir())


def test_the_program_itself(tmp_path: Path) -> None:
    """pretrain_gpt.py from anywhere, without a launcher, without the test server: no output that is not meant."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "pretrain_gpt.py"), *TINY, "--train-iters", "1", "--seq-length", "1024"],
        env={**environment, "OMP_NUM_THREADS": "1"}, cwd=tmp_path, timeout=LIMIT_SECONDS,
        capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert "iteration        1/" in done.stdout


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
    with launch.start(2, [*words, *flags.split()]) as run:
        ended = run.end(LIMIT_SECONDS)
    assert all(code != 0 for code in ended.codes), ended
    lines = ended.all_err.strip().splitlines()
    assert lines and message in lines[0], ended.all_err
    assert set(lines) == {lines[0]}
    assert lines[0].startswith("error: ")


RESTART = """
import os, sys
sys.path.insert(0, {root!r})
from megatron.train import loop, main
original = loop._Loop._iteration
def iteration(self, batches):
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first and self.progress.iteration == 3 and self.run.launch.rank == 1:
        raise RuntimeError("planted")
    return original(self, batches)
loop._Loop._iteration = iteration
main.main()
"""


@pytest.mark.full
def test_torchrun_restarts_from_the_last_checkpoint(tmp_path: Path) -> None:
    """--max-restarts: a rank fails once after its checkpoint; the second start goes on from there to the end."""
    program, save = tmp_path / "program.py", str(tmp_path / "save")
    program.write_text(RESTART.format(root=str(ROOT)))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--local-addr=127.0.0.1"]
    words = [*TINY, *f"--train-iters 5 --save {save} --load {save} --save-interval 2".split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*command, str(program), *words], capture_output=True, text=True, timeout=300, env=environment
    )
    assert ended.returncode == 0, ended.stderr
    assert "RuntimeError: planted" in ended.stderr
    assert "loaded the checkpoint of iteration 2" in ended.stdout
    assert "iteration        5/" in ended.stdout
