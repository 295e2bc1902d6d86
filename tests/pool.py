"""One warm pool of worker processes for all multi-rank tests of a pytest session.

    def all_ones(rank, world_size, size):            # top level of an importable test module
        tensor = torch.ones(size)
        dist.all_reduce(tensor)
        return tensor

    results = run_ranks(all_ones, 4, 10)             # list by rank

Importing torch costs seconds, so it is imported once, by multiprocessing's fork server (a fresh process
without threads); workers are forked from that, kept, and given one fresh process group per call. An
exception on any rank ends the call with that rank's traceback; a hang ends it with every worker's Python
stacks. Workers that took part in a hang are killed and replaced at next use.

Tests that patch torch globally use a pool of their own: `Pool(initializer=patch)`, one per kind of patch,
made at module level (it starts nothing before its first call).

Nothing is bound to a fixed port or file name, so any number of pytest sessions can share a machine.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import time
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.pool_worker import Answer, Call, WorkerSpec, worker_main

REPOSITORY_ROOT = Path(__file__).resolve().parent.parent
MAX_WORKERS = 8
START_TIMEOUT_SECONDS = 120.0
PEER_GRACE_SECONDS = 3.0
"""How long the peers of a failed rank may take to notice before they are killed."""
STACK_DUMP_SECONDS = 0.5
LOG_TAIL_CHARACTERS = 6000
_PRELOAD = ["torch", "torch.distributed", "torch.distributed.tensor", "numpy", "pytest"]


class RankError(RuntimeError):
    """A rank raised, died or hung. `rank` is the first one; `traceback` is its text."""

    def __init__(self, rank: int, traceback: str, message: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback


class RankTimeoutError(RankError):
    """A call did not finish in time; the message holds the stacks of the workers that were still busy."""


@dataclass
class _Worker:
    process: Any
    connection: Connection
    log_path: Path
    log_offset: int = 0
    ready: bool = False

    def log_tail(self) -> str:
        """What the worker printed during the present call."""
        with contextlib.suppress(OSError), open(self.log_path, errors="replace") as log:
            log.seek(self.log_offset)
            return log.read()[-LOG_TAIL_CHARACTERS:]
        return ""

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self.process.kill()
        self.process.join(5)
        self.connection.close()


class Pool:
    """Up to 8 warm workers, started at first use.

    Arguments:
        initializer: picklable function without arguments, run once in each worker before its first call.
        backend: of the process groups, "gloo" unless the test is about another one.
    """

    def __init__(self, initializer: Callable[[], None] | None = None, backend: str = "gloo") -> None:
        self._initializer = initializer
        self._backend = backend
        self._workers: list[_Worker | None] = []
        self._store: Any = None
        self._directory: Path | None = None
        self._calls = 0
        self._owner = os.getpid()
        _pools.add(self)

    def run(
        self, function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60
    ) -> list[Any]:
        """Call `function(rank, world_size, *args)` on ranks 0..world_size-1 and return the results by rank.

        Arguments:
            function: top-level function of an importable module.
            world_size: 1 to 8.
            args: picklable; every rank gets its own copy.
            timeout: seconds for the whole call, the start of new workers not counted.

        Raises:
            RankError: a rank raised or died. RankTimeoutError: time was up.
        """
        if not 1 <= world_size <= MAX_WORKERS:
            raise ValueError(f"world_size {world_size} is not within 1..{MAX_WORKERS}")
        if os.getpid() != self._owner:
            raise RuntimeError("run_ranks was called inside a worker; only the pytest process may")
        payload = _pickle_call(function, args)
        workers = self._ready_workers(world_size)
        self._calls += 1
        try:
            for rank, worker in enumerate(workers):
                worker.log_offset = worker.log_path.stat().st_size
                call = Call(self._calls, rank, world_size, self._backend, timeout, payload)
                with contextlib.suppress(BrokenPipeError):  # a dead worker is reported by _collect
                    worker.connection.send(call)
            return self._collect(workers, timeout)
        except RankError:
            raise
        except BaseException:  # Ctrl-C, pytest's own timeout: nobody knows what the workers are at
            self._retire(range(world_size))
            raise

    def close(self) -> None:
        """Stop the workers. The pool may be used again."""
        if os.getpid() != self._owner:
            return
        for worker in self._workers:
            if worker is not None:
                worker.connection.close()
        for worker in self._workers:
            if worker is not None:
                worker.process.join(0.5)
                worker.kill()
        self._workers.clear()
        self._store = None
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def worker_ids(self) -> list[int | None]:
        """Process ids by rank; None where a worker was retired."""
        return [worker.process.pid if worker else None for worker in self._workers]

    def _ready_workers(self, world_size: int) -> list[_Worker]:
        """Start what is missing, all at once, and wait until each has answered."""
        for rank, worker in enumerate(self._workers):
            # An idle worker says nothing: what can be read from it is the end of a closed connection.
            if worker is not None and (worker.connection.poll() or not worker.process.is_alive()):
                self._retire([rank])  # died between two calls
        self._workers.extend([None] * (world_size - len(self._workers)))
        workers = []
        for rank in range(world_size):
            worker = self._workers[rank] = self._workers[rank] or self._start(rank)
            workers.append(worker)
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        for rank, worker in enumerate(workers):
            if worker.ready:
                continue
            answer = None
            with contextlib.suppress(EOFError, OSError):
                if worker.connection.poll(max(0.0, deadline - time.monotonic())):
                    answer = worker.connection.recv()
            if answer is None or answer.error is not None:
                reason = answer.error if answer else f"no answer from the new worker\n{worker.log_tail()}"
                self._retire(range(world_size))
                raise RankError(rank, reason, f"worker {rank} did not start:\n{reason}")
            worker.ready = True
        return workers

    def _start(self, rank: int) -> _Worker:
        if self._store is None:
            import torch.distributed as dist

            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="megatron-nd-pool-"))
        log_path = self._directory / f"worker-{rank}-{time.monotonic_ns()}.log"
        spec = WorkerSpec(str(REPOSITORY_ROOT), self._store.port, str(log_path), self._initializer)
        context = multiprocessing.get_context("forkserver")
        parent_end, child_end = context.Pipe()
        with _worker_environment():
            context.set_forkserver_preload(_PRELOAD)
            process = context.Process(target=worker_main, args=(spec, child_end), daemon=True)
            process.start()
        child_end.close()
        return _Worker(process, parent_end, log_path)

    def _collect(self, workers: Sequence[_Worker], timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        pending = dict(enumerate(workers))
        deadline = time.monotonic() + timeout
        while pending and time.monotonic() < deadline:
            had_failures = bool(failures)
            for rank in self._wait_for_any(pending, deadline):
                answer = self._receive(rank, pending.pop(rank))
                if answer.error is None:
                    results[rank] = pickle.loads(answer.payload)
                else:
                    failures[rank] = answer.error
            if failures and not had_failures:
                deadline = min(deadline, time.monotonic() + PEER_GRACE_SECONDS)
        if pending and not failures:
            self._fail_with_stacks(pending, timeout)
        self._retire(pending)
        if failures:
            raise _rank_error(failures, sorted(pending))
        return [results[rank] for rank in range(len(workers))]

    def _wait_for_any(self, pending: dict[int, _Worker], deadline: float) -> list[int]:
        """Ranks that have answered or died, in the order of their death or else by rank."""
        ranks = {worker.connection: rank for rank, worker in pending.items()}
        ready = wait(list(ranks), max(0.0, deadline - time.monotonic()))
        return sorted(ranks[connection] for connection in ready)  # type: ignore[index]

    def _receive(self, rank: int, worker: _Worker) -> Answer:
        try:
            return worker.connection.recv()
        except (EOFError, OSError):
            worker.process.join(5)
            text = f"worker died with exit code {worker.process.exitcode}\n{worker.log_tail()}"
            self._retire([rank])
            return Answer(self._calls, error=text)

    def _fail_with_stacks(self, pending: dict[int, _Worker], timeout: float) -> None:
        for worker in pending.values():
            with contextlib.suppress(OSError):
                os.kill(worker.process.pid, signal.SIGUSR1)  # faulthandler, see pool_worker.py
        time.sleep(STACK_DUMP_SECONDS)
        stacks = {rank: worker.log_tail() for rank, worker in pending.items()}
        self._retire(pending)
        text = "\n".join(
            f"--- rank {rank} was here (most recent call first):\n{s}" for rank, s in stacks.items()
        )
        message = f"ranks {sorted(stacks)} did not finish within {timeout:g} s\n{text}"
        first = min(stacks)
        raise RankTimeoutError(first, stacks[first], message)

    def _retire(self, ranks: Sequence[int] | dict[int, _Worker] | range) -> None:
        for rank in list(ranks):
            worker, self._workers[rank] = self._workers[rank], None
            if worker is not None:
                worker.kill()


def _pickle_call(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Plain pickle: tensors are copied, never shared between ranks."""
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", repr(function))
    if module == "__main__" or "<locals>" in name or "<lambda>" in name:
        raise ValueError(
            f"{module}.{name} cannot be sent to a worker: use a top-level function of a test module"
        )
    return pickle.dumps((function, args))


def _rank_error(failures: dict[int, str], killed: list[int]) -> RankError:
    first = next(iter(failures))
    parts = [f"rank {first} failed:\n{failures[first]}"]
    parts += [f"then rank {rank}:\n{text}" for rank, text in failures.items() if rank != first]
    if killed:
        parts.append(f"ranks {killed} did not notice within {PEER_GRACE_SECONDS:g} s and were killed")
    return RankError(first, failures[first], "\n".join(parts))


@contextlib.contextmanager
def _worker_environment() -> Iterator[None]:
    """Set what the fork server inherits, and hide `__main__`, which a worker would import again."""
    settings = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if sys.platform == "linux":
        settings["GLOO_SOCKET_IFNAME"] = "lo"
    before = {name: os.environ.get(name) for name in settings}
    main = sys.modules["__main__"]
    os.environ.update(settings)
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()
_default_pool = Pool()


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60) -> list[Any]:
    """Run `function(rank, world_size, *args)` on the session's shared pool; see `Pool.run`."""
    return _default_pool.run(function, world_size, *args, timeout=timeout)


def close_all_pools() -> None:
    """Stop the workers of every pool; called at the end of a pytest session."""
    for pool in list(_pools):
        pool.close()


atexit.register(close_all_pools)


def free_port() -> int:
    """A TCP port that was free a moment ago, for launchers that must be told one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
