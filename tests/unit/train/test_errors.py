"""Whose error it is, what is printed, and how the process ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megatron.train.errors import RunStopped, is_lost_peer, is_users
from megatron.train.lr_schedule import ScheduleConfig


def caught(action: object) -> BaseException:
    try:
        action()  # type: ignore[operator]
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_a_value_error_of_ours_is_the_users() -> None:
    assert is_users(caught(lambda: ScheduleConfig(max_lr=-1.0)))


def test_other_errors_are_bugs() -> None:
    import torch

    assert not is_users(caught(lambda: int("x")))  # a ValueError, but not from a line of ours
    assert not is_users(caught(lambda: torch.ones(2).view(3)))
    assert not is_users(caught(lambda: {}["x"]))
    assert is_users(RunStopped("enough"))


def test_lost_peers() -> None:
    assert is_lost_peer(RuntimeError("[../gloo/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"))
    assert not is_lost_peer(RuntimeError("shapes differ"))
    assert not is_lost_peer(ValueError("Connection closed by peer"))


PROGRAM = """
import os, sys
from megatron.train.errors import RunStopped, one_line_errors
from megatron.train.lr_schedule import ScheduleConfig

for number, action in enumerate(sys.argv[2:]):
    child = os.fork()  # one import for all actions
    if child == 0:
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{sys.argv[1]}/{number}.{name}", os.O_WRONLY | os.O_CREAT), stream)
        os.environ["TORCHELASTIC_ERROR_FILE"] = f"{sys.argv[1]}/{number}.json"
        with one_line_errors(0):
            exec(action)
        print("still here")
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
ENDS = [
    ("pass", 0, ""),
    ("ScheduleConfig(max_lr=0.1, min_lr=0.2)", 2, "error: --lr 0.1 is below --min-lr 0.2"),
    ("raise RunStopped('one\\n line')", 2, "error: one line"),
    ("raise RuntimeError('Connection closed by peer')", 3, "error: a rank has gone"),
    ("1 / 0", 1, "ZeroDivisionError"),
]


def test_exit_status_and_message(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), *(action for action, _, _ in ENDS)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [str(code) for _, code, _ in ENDS]
    for number, (_, code, words) in enumerate(ENDS):
        out, err = ((tmp_path / f"{number}.{name}").read_text() for name in ("out", "err"))
        assert words in err
        assert ("Traceback" in err) == (code == 1)
        assert ("still here" in out) == (code == 0)
        if code == 2:
            assert len(err.strip().splitlines()) == 1
        # What torchrun prints last is its summary: it ends with the reason where this rank has one.
        record = tmp_path / f"{number}.json"
        assert record.exists() == (code in (1, 2))
        if record.exists():
            failure = ProcessFailure(local_rank=0, pid=1, exitcode=code, error_file=str(record))
            summary = str(ChildFailedError("pretrain_gpt.py", {0: failure}))
            assert words in summary and "To enable traceback" not in summary
