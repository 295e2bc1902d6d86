"""Ranks of pretrain_gpt.py as processes of their own, for tests of how runs end, without their start-up time.

    with start(2, words, plant="tests.unit.train.test_faults:skip_a_collective") as run:
        run.wait_for("iteration        2/")
        run.signal(1, signal.SIGKILL)
        ended = run.end(30)                 # exit statuses by rank, stdout and stderr of each

Importing the program takes seconds, so a server process imports it once and forks: each rank is a real process with
its own exit status, streams and signals, in torchrun's environment. `plant` names a function that is called in each
rank before the program, with its rank; it may put a fault anywhere. The server ends with the test session.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from tests.pool import REPOSITORY_ROOT, free_port

START_SECONDS = 120.0


@dataclass
class Ended:
    """How a run ended: exit statuses (negative: a signal) and what was written, by rank; None: still running."""

    codes: list[int | None]
    out: list[str]
    err: list[str]
    seconds: float

    @property
    def all_err(self) -> str:
        """What all ranks wrote to stderr."""
        return "".join(self.err)


class _Server:
    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def ask(self, **request: Any) -> Any:
        if self._process is None or self._process.poll() is not None:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY_ROOT)}
            for name in [name for name in environment if name.startswith(("SLURM_", "TORCHELASTIC"))]:
                del environment[name]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.launch"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=REPOSITORY_ROOT,
                env=environment,
            )
            atexit.register(self.close)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


_server = _Server()


def rank_variables(rank: int, ranks: int, port: str) -> dict[str, str]:
    """torchrun's variables of one rank on this machine."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }


class Started:
    """A run under way; leaving the context kills what is left of it."""

    def __init__(self, ranks: int, words: Sequence[str], plant: str, environment: dict[str, str]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="launch-"))
        self.ranks = ranks
        self.pids: list[int] = []
        self._codes: dict[int, int] = {}
        port = str(free_port())
        self.began = time.monotonic()
        for rank in range(ranks):
            launch = {**rank_variables(rank, ranks, port), **environment}
            files = [str(self._folder / f"{stream}{rank}") for stream in ("out", "err")]
            self.pids.append(_server.ask(do="start", words=list(words), plant=plant, env=launch, files=files))

    def __enter__(self) -> Started:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for rank in range(self.ranks):
            self.signal(rank, signal.SIGKILL)
        self._poll()

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a rank that still runs."""
        self._poll()
        if self.pids[rank] not in self._codes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], number)

    def text(self, stream: str, rank: int) -> str:
        """What a rank has written so far; stream: "out" or "err"."""
        path = self._folder / f"{stream}{rank}"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for(self, text: str, rank: int = 0, stream: str = "out", timeout: float = 60.0) -> None:
        """Return when a rank has written `text`; fail if it ends, or the time does, before."""
        deadline = time.monotonic() + timeout
        while text not in self.text(stream, rank):
            self._poll()
            gone = self.pids[rank] in self._codes and text not in self.text(stream, rank)
            assert not gone and time.monotonic() < deadline, (text, self._ended())
            time.sleep(0.02)

    def end(self, timeout: float = 60.0, but: Sequence[int] = ()) -> Ended:
        """Wait until all ranks have ended, but those given; fail after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        wanted = {pid for rank, pid in enumerate(self.pids) if rank not in but}
        while not wanted <= set(self._codes):
            self._poll()
            assert time.monotonic() < deadline, self._ended()
            time.sleep(0.02)
        return self._ended()

    def _poll(self) -> None:
        self._codes |= {
            int(pid): code for pid, code in _server.ask(do="codes").items() if int(pid) in self.pids
        }

    def _ended(self) -> Ended:
        codes = [self._codes.get(pid) for pid in self.pids]
        streams = {name: [self.text(name, rank) for rank in range(self.ranks)] for name in ("out", "err")}
        return Ended(codes, streams["out"], streams["err"], time.monotonic() - self.began)


def start(
    ranks: int, words: Sequence[str], plant: str = "", environment: dict[str, str] | None = None
) -> Started:
    """Start a run of pretrain_gpt.py.

    words: its command line. plant: "module:function", called with the rank before the program.
    """
    return Started(ranks, words, plant, environment or {})


def _serve(requests: Iterator[str], answers: IO[str]) -> None:
    import megatron.train.loop
    import megatron.train.main
    import megatron.train.report  # noqa: F401
    from tests.mock_data import shrink_mock_data

    shrink_mock_data()
    codes: dict[int, int] = {}
    for line in requests:
        request = json.loads(line)
        if request["do"] == "start":
            pid = os.fork()
            if pid == 0:
                _become_a_rank(request)
            answer: Any = pid
        else:
            with contextlib.suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                    codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])
            answer = codes
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _become_a_rank(request: dict[str, Any]) -> None:
    """Never returns."""
    code = 70
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, path in enumerate(request["files"], 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        os.environ.update(request["env"])
        sys.argv = ["pretrain_gpt.py", *request["words"]]
        if request["plant"]:
            module, _, name = request["plant"].partition(":")
            getattr(importlib.import_module(module), name)(int(request["env"]["RANK"]))
        from megatron.train.main import main

        main()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve(iter(sys.stdin.readline, ""), sys.stdout)
