"""Child side of tests/pool.py: one process that runs functions as one rank of a fresh process group."""

from __future__ import annotations

import ctypes
import datetime
import faulthandler
import gc
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

PR_SET_PDEATHSIG = 1
OUR_MODULES = ("megatron.models.", "megatron.parallel.", "tests.")


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker needs to know at its start."""

    repository_root: str
    store_port: int
    log_path: str
    initializer: Callable[[], None] | None


@dataclass(frozen=True)
class Call:
    """One rank's share of a `run_ranks` call. `payload` is the pickled (function, args)."""

    number: int
    rank: int
    world_size: int
    backend: str
    timeout: float
    payload: bytes


@dataclass(frozen=True)
class Answer:
    """`payload` is the pickled result when `error` is None, else `error` is a traceback."""

    number: int
    payload: bytes = b""
    error: str | None = None


def worker_main(spec: WorkerSpec, connection: Connection) -> None:
    """Serve calls until the parent closes the connection."""
    _prepare_process(spec)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", spec.store_port, is_master=False, wait_for_workers=False)
    if spec.initializer is not None:
        try:
            spec.initializer()
        except BaseException:
            connection.send(Answer(0, error=traceback.format_exc()))
            return
    connection.send(Answer(0))
    gc.freeze()
    while True:
        try:
            _serve(connection.recv(), store, connection.send)
            gc.freeze()  # what survives (modules, mostly) need not be walked after each call: 25 ms
        except (EOFError, OSError):  # the parent has closed its end, or is gone
            return


def _prepare_process(spec: WorkerSpec) -> None:
    """Own log instead of the terminal, stacks on SIGUSR1, death with the parent, repository importable."""
    log = os.open(spec.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=2, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C belongs to pytest, which then closes us
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    sys.path[:] = [spec.repository_root, *(path for path in sys.path if path != spec.repository_root)]
    warnings.simplefilter("ignore")


def _serve(call: Call, store: Any, send: Callable[[Answer], None]) -> None:
    """Run one call inside its own process group and send its answer; raises only if the parent is gone."""
    import torch.distributed as dist

    failed = False

    def fail() -> None:
        nonlocal failed
        if not failed:
            send(Answer(call.number, error=traceback.format_exc()))
        failed = True

    try:
        function, args = pickle.loads(call.payload)
        dist.init_process_group(
            call.backend,
            store=dist.PrefixStore(f"call-{call.number}", store),
            rank=call.rank,
            world_size=call.world_size,
            # Longer than the parent's patience: it is the parent who reports a hang, with stacks.
            timeout=datetime.timedelta(seconds=2 * call.timeout + 10),
        )
        payload = pickle.dumps(function(call.rank, call.world_size, *args))
    except BaseException:
        fail()  # before the group goes away, so that the cause arrives before what it causes on the peers
    try:
        # Closes the sockets, which wakes peers that wait in a collective for this rank.
        if dist.is_initialized():
            dist.destroy_process_group()
        function = args = None
        _reset_process()
        if not failed:
            _check_nothing_is_left()
    except BaseException:
        fail()
    if not failed:
        send(Answer(call.number, payload=payload))


def _check_nothing_is_left() -> None:
    """Fail where a model that a call has made outlives it.

    Something holds it that Python's collector does not see through: a circle through autograd's graph, mostly. A
    training step that leaves such a thing behind uses up memory.
    """
    import torch

    # What was there before the call is frozen, and not seen here.
    modules = [type(one) for one in gc.get_objects() if isinstance(one, torch.nn.Module)]
    # megatron-core and the compiler have caches that hold theirs.
    left = {kind.__qualname__ for kind in modules if kind.__module__.startswith(OUR_MODULES)}
    if left:
        raise AssertionError(
            f"modules outlive the call that made them, {', '.join(sorted(left))}: look for a circle through autograd's "
            "graph (a ctx that holds an output or its object), a cache or a hook"
        )


def _reset_process() -> None:
    """Undo what a test may leave behind in torch's process-wide state."""
    import torch

    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    # What torch.use_deterministic_algorithms(False) does, without its import of the compiler (0.7 s).
    torch._C._set_deterministic_algorithms(False, warn_only=False)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if "torch.distributed.tensor" in sys.modules:
        # DTensor caches output specs by mesh equality, which ignores group names: a cached spec could
        # lead the next call's collectives into a group of another shape.
        from torch.distributed.tensor import DTensor

        # torch.distributed.tensor.debug has this as a function, and imports the compiler (0.9 s).
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
        getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()
        # Plans of redistributions keep meshes, and these their groups.
        from torch.distributed.tensor import _redistribute

        getattr(_redistribute, "_planner_cache", {}).clear()
        getattr(_redistribute._gen_transform_infos, "cache_clear", lambda: None)()
    gc.collect()
