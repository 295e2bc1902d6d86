"""How a run ends badly: one clear line for what a user can fix, a traceback for what is our bug, on every
rank.

Note "Whose error": a ValueError raised by a line of ours (this package's directories, tools and datasets
included) is the user's and becomes one line. The same exception from inside torch is a bug and keeps its
traceback.

Note "Who prints": ranks usually fail with the same message at the same time, and a rank that fails alone
makes the others fail in their next collective. The rendezvous store counts: the first failing rank prints
its reason, later ones print only what is new. Before there is a store, ranks other than 0 wait a moment: a
launcher that sees rank 0 end stops them, and a rank that failed alone still speaks.

Note "All end": the first rank that fails, once it has printed, says so in the store, where the watchdogs of the others
see it (watchdog.py): also where their communicators would not notice for a long time.

Note "Roll call": a rank that was killed says nothing. Who loses a peer, and finds no word of a failure, calls in the
store; the watchdog of every live rank answers within its interval, however busy its main thread is; who does not answer
is named, and that is said in the store like a failure.

Note "The host leaves last": rank 0's process may hold the store. If it ended while others still speak to the store,
torch would print a stack trace for each of their calls; so it waits for their last words, for a moment.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from megatron.parallel.pipeline.executor import PipelineError
from megatron.train.initialize import record_for_launcher

USER_EXIT_CODE = 2
BUG_EXIT_CODE = 1
PEER_EXIT_CODE = 3
STALL_EXIT_CODE = 4

FAILED_KEY = "megatron.train.errors/failed"
ROLL_CALL_KEY = "megatron.train.errors/roll_call"

_GONE = "gone "
_LEFT_KEY = "megatron.train.errors/left"
_ALONE_SECONDS = 2.0
_LAST_WORDS_SECONDS = 2.0
_ROLL_CALL_SECONDS = 4.5  # above twice the longest interval of a watchdog

_OURS = Path(__file__).resolve().parent.parent
_PEER_LOST = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "socket closed",
    "remote process has terminated",
    "ncclremoteerror",
)


class RunStopped(RuntimeError):
    """The run must end, and the message says all there is to say (NaN, a full disk, a foreign checkpoint)."""


def is_users(error: BaseException) -> bool:
    """Whether `error` is the user's to fix (note "Whose error")."""
    if isinstance(error, RunStopped):
        return True
    if not isinstance(error, ValueError):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return False
    path = Path(frames[-1].filename).resolve()
    return _OURS in path.parents and (_OURS / "core") not in path.parents


def is_lost_peer(error: BaseException) -> bool:
    """Whether `error` only says that another rank has gone."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _PEER_LOST)


@contextlib.contextmanager
def one_line_errors(rank: int = 0) -> Iterator[None]:
    """End the process with a message instead of raising.

    Exit status: 2 the user's error, 1 a bug (with its traceback), 3 another rank has gone.
    """
    try:
        yield
    except Exception as error:
        sys.stdout.flush()
        code, text = _report(error, rank)
        if code != PEER_EXIT_CODE:
            record_for_launcher(text)
        announce(text, rank)
        if code != PEER_EXIT_CODE:
            _tell_others(rank)
        _leave(rank)
        # Not sys.exit: leaving the interpreter would wait in the destructors of communicators whose peers
        # are at work, and of data-loading threads.
        sys.stderr.flush()
        os._exit(code)


def _report(error: BaseException, rank: int) -> tuple[int, str]:
    if is_users(error):
        return USER_EXIT_CODE, f"error: {' '.join(str(error).split())}"
    if is_lost_peer(error):
        where = f" ({' '.join(str(error).split())})" if isinstance(error, PipelineError) else ""
        return PEER_EXIT_CODE, lost_message(_why_lost(rank), where)
    lines = "".join(traceback.format_exception(error))
    return BUG_EXIT_CODE, f"[rank {rank}] {lines}".rstrip()


def peer_message(reason: str = "a rank has gone", where: str = "") -> str:
    """What a rank says that ends because of another."""
    return f"error: {reason}; its own message says why{where}"


def lost_message(failed: str, where: str = "") -> str:
    """What a rank says that lost a peer. failed: what FAILED_KEY holds, or ""."""
    if failed.startswith(_GONE):
        ranks = failed.removeprefix(_GONE)
        who = f"ranks {ranks} have" if "," in ranks else f"rank {ranks} has"
        return f"error: {who} gone without a message: killed (out of memory?), or the host is down{where}"
    return peer_message(f"rank {failed} failed" if failed else "a rank has gone", where)


def answer_roll_call(store: dist.Store, rank: int) -> None:
    """Tell, where somebody asks, that this rank is there (note "Roll call"); for the watchdog's thread."""
    if store.check([ROLL_CALL_KEY]):
        store.set(f"{ROLL_CALL_KEY}/{rank}", "")


def _why_lost(rank: int) -> str:
    """What FAILED_KEY says, after a roll call if it says nothing yet; "" where the store does not answer."""
    if not dist.is_initialized():
        return ""
    with contextlib.suppress(Exception):
        store = dist.distributed_c10d._get_default_store()
        store.set(ROLL_CALL_KEY, "")
        answer_roll_call(store, rank)  # this rank's watchdog may have ended already
        absent = set(range(dist.get_world_size())) - {rank}
        deadline = time.monotonic() + _ROLL_CALL_SECONDS
        while absent and time.monotonic() < deadline and not store.check([FAILED_KEY]):
            absent = {each for each in absent if not store.check([f"{ROLL_CALL_KEY}/{each}"])}
            time.sleep(0.05)
        if absent and not store.check([FAILED_KEY]):
            gone = _GONE + ", ".join(map(str, sorted(absent)))
            return store.compare_set(FAILED_KEY, "", gone).decode()
        return store.get(FAILED_KEY).decode() if store.check([FAILED_KEY]) else ""
    return ""


def announce(text: str, rank: int) -> None:
    """Print a reason unless another rank already did (note "Who prints")."""
    if _first_to_say(text, rank):
        print(text, file=sys.stderr, flush=True)


def _tell_others(rank: int) -> None:
    """Note "All end"."""
    if dist.is_initialized():
        with contextlib.suppress(Exception):
            dist.distributed_c10d._get_default_store().compare_set(FAILED_KEY, "", str(rank))


def _leave(rank: int) -> None:
    """The last use of the store (note "The host leaves last")."""
    if not dist.is_initialized():
        return
    with contextlib.suppress(Exception):
        store = dist.distributed_c10d._get_default_store()
        if rank != 0:
            store.add(_LEFT_KEY, 1)
            return
        wait_for_ranks(store, _LEFT_KEY, dist.get_world_size() - 1)


def wait_for_ranks(store: dist.Store, key: str, count: int) -> None:
    """Wait, for a moment, until `count` ranks have added themselves to `key`."""
    deadline = time.monotonic() + _LAST_WORDS_SECONDS
    while store.add(key, 0) < count and time.monotonic() < deadline:
        time.sleep(0.02)


def _first_to_say(text: str, rank: int) -> bool:
    """Whether no rank has printed `text` yet (note "Who prints")."""
    if not dist.is_initialized():
        if rank != 0:
            time.sleep(_ALONE_SECONDS)
        return True
    with contextlib.suppress(Exception):
        store = dist.distributed_c10d._get_default_store()
        key = "megatron.train.errors/" + hashlib.sha1(text.encode()).hexdigest()
        return store.add(key, 1) == 1
    return True
