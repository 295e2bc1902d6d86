"""A thread that notices when a run stands still or a rank has failed, says why, and ends this rank.

Note "Progress" is an iteration, a change of phase, or a collective launched or ended. A rank that has made none for
`limit` seconds writes "stalled" into the rendezvous store, where the threads of all ranks see it. Each prints where its
threads are and what its collectives do, and leaves a report in the store; the lowest rank that reports prints what the
reports say together (stall.py). Whoever has made progress meanwhile says so, and the run goes on; else it ends.

Note "No waiting". Only the store is used to talk, over a connection of its own with a time limit: never a collective,
and never a call that waits for a device. A thread that keeps Python's lock would stop this one too: then faulthandler,
which needs no lock, prints the stacks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from megatron.parallel.flight import RECORDER
from megatron.train.errors import (
    FAILED_KEY,
    PEER_EXIT_CODE,
    STALL_EXIT_CODE,
    announce,
    answer_roll_call,
    lost_message,
    wait_for_ranks,
)
from megatron.train.stall import described, diagnose

_OURS = Path(__file__).resolve().parent.parent
_STORE_SECONDS = 10.0
_FAILED_GRACE_SECONDS = 2.0
_MAX_GRACE_SECONDS = 15.0


@dataclass(frozen=True)
class WatchdogOptions:
    """limit: seconds without progress; 0 watches for failed ranks only. trace_path: where torch's flight recorder is
    dumped, with "_<rank>" behind it. stacks, only_active: of that dump.
    """

    limit: float
    trace_path: str | None = None
    stacks: bool = False
    only_active: bool = True

    @property
    def interval(self) -> float:
        """Seconds between looks."""
        return min(max(self.limit / 10, 0.1), 2.0) if self.limit else 2.0

    @property
    def grace(self) -> float:
        """Seconds that reports of other ranks are waited for."""
        return min(max(self.limit / 2, 2.0), _MAX_GRACE_SECONDS)


class Watchdog:
    """Context of a run (notes above).

    Args:
        options: see WatchdogOptions.
        rank, world_size: of this process.
        end: what to do with an exit status in the end.
    """

    def __init__(
        self,
        options: WatchdogOptions,
        rank: int,
        world_size: int,
        end: Callable[[int], Any] = os._exit,
    ) -> None:
        self.options, self.rank, self.world_size = options, rank, world_size
        self._end = end
        self._store: Any = None
        self._phases = ["start"]
        self.iteration = 0
        self._beats = 0
        self._seen: tuple[int, int] = (-1, -1)
        self._since = time.monotonic()
        self._round = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        if dist.is_initialized():
            with contextlib.suppress(Exception):
                self._store = _own_connection()
        self._since = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        faulthandler.cancel_dump_traceback_later()
        self._thread.join(self.options.interval + 1.0)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What the run is doing, for reports."""
        self._phases.append(name)
        self._beats += 1
        try:
            yield
        finally:
            self._phases.pop()
            self._beats += 1

    def beat(self, iteration: int) -> None:
        """An iteration has ended."""
        self.iteration = iteration
        self._beats += 1

    # --- the thread ------------------------------------------------------------

    def _watch(self) -> None:
        while not self._stop.wait(self.options.interval):
            try:
                self._look()
            except Exception as error:  # the watchdog must not be what ends a good run
                if not self._stop.is_set() and self._stalled():
                    self._say(f"the rendezvous store does not answer ({_short(error)}): its host may be gone")
                    self._dump(self._report())
                    self._end(STALL_EXIT_CODE)

    def _look(self) -> None:
        if self.options.limit:
            faulthandler.dump_traceback_later(2.0 * self.options.limit + 60.0, exit=False)
        stalled = self._stalled()
        if self._store is None:
            if stalled:
                self._handle_stall()
            return
        answer_roll_call(self._store, self.rank)
        if self._store.check([FAILED_KEY]):
            self._leave()
        key = self._key("stalled")
        if stalled:
            self._store.set(key, str(self.rank))
        if stalled or self._store.check([key]):
            self._handle_stall()

    def _stalled(self) -> bool:
        now = (self._beats, RECORDER.events)
        if now != self._seen:
            self._seen, self._since = now, time.monotonic()
        return bool(self.options.limit) and time.monotonic() - self._since > self.options.limit

    def _key(self, name: str) -> str:
        return f"megatron.train.watchdog/{self._round}/{name}"

    def _leave(self) -> None:
        """Another rank has failed. The main thread may be about to say so itself."""
        if self._stop.wait(_FAILED_GRACE_SECONDS):
            return
        failed = self._store.get(FAILED_KEY).decode()
        if failed != str(self.rank):
            announce(lost_message(failed), self.rank)
            self._end(PEER_EXIT_CODE)

    def _handle_stall(self) -> None:
        report = self._report()
        before = self._seen
        self._dump(report)
        reports = {self.rank: report}
        if self._store is not None:
            self._store.set(self._key(f"report {self.rank}"), json.dumps(report))
            reports = self._collect()
        if self.rank == min(reports):
            for line in diagnose(reports, self.world_size):
                self._say(line)
        if self._moved(before):
            self._say("the run goes on: it was slow, not stuck")
            self._round += 1
            return
        self._say(f"ending this rank with status {STALL_EXIT_CODE}")
        if self._store is not None:
            # Together: else the main thread of a rank that is a little behind would see a peer go, and say only that.
            with contextlib.suppress(Exception):
                self._store.add(self._key("ending"), 1)
                wait_for_ranks(self._store, self._key("ending"), len(reports))
        self._end(STALL_EXIT_CODE)

    def _collect(self) -> dict[int, dict[str, Any]]:
        """Reports of all ranks, of as many as come in time."""
        keys = {rank: self._key(f"report {rank}") for rank in range(self.world_size)}
        found: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + self.options.grace
        while len(found) < self.world_size and time.monotonic() < deadline:
            for rank in [rank for rank in keys if rank not in found]:
                if self._store.check([keys[rank]]):
                    found[rank] = json.loads(self._store.get(keys[rank]))
            time.sleep(0.05)
        return found

    def _moved(self, before: tuple[int, int]) -> bool:
        """Whether any rank has made progress since; all ranks come to the same answer."""
        time.sleep(self.options.interval)
        moved = (self._beats, RECORDER.events) != before
        if self._store is None:
            return moved
        if moved:
            self._store.set(self._key("moved"), "1")
        time.sleep(self.options.interval)
        return bool(self._store.check([self._key("moved")]))

    def _report(self) -> dict[str, Any]:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        return {
            "rank": self.rank,
            "host": socket.gethostname(),
            "phase": self._phases[-1],
            "iteration": self.iteration,
            "seconds": round(time.monotonic() - self._since, 1),
            "place": _place(frame),
            "lanes": RECORDER.report(),
        }

    def _dump(self, report: dict[str, Any]) -> None:
        """This rank's side: stacks of all threads, what its collectives do."""
        lines = [
            f"no progress for {report['seconds']:g} s in {report['phase']}, iteration {report['iteration']} "
            f"(host {report['host']})"
        ]
        for lane in report["lanes"]:
            if lane["last"] is not None:
                lines.append(f"ended last: {described(lane, lane['last'])}")
            for flight in lane["pending"]:
                lines.append(f"{flight['state']} for {flight['seconds']:g} s: {described(lane, flight)}")
        if not any(lane["pending"] for lane in report["lanes"]):
            lines.append("no collective is pending on this rank")
        self._say("\n".join([*lines, *_stacks()]))
        self._dump_trace()

    def _dump_trace(self) -> None:
        if self.options.trace_path is None:
            return
        path = Path(f"{self.options.trace_path}_{self.rank}")
        with contextlib.suppress(Exception):
            path.parent.mkdir(parents=True, exist_ok=True)
            options = self.options
            path.write_bytes(
                torch._C._distributed_c10d._dump_fr_trace(True, options.stacks, options.only_active)
            )
            self._say(f"torch's flight recorder is in {path}")

    def _say(self, text: str) -> None:
        prefix = f"[rank {self.rank}] watchdog: "
        print("\n".join(prefix + line for line in text.splitlines()), file=sys.stderr, flush=True)


def _own_connection() -> Any:
    """A connection to the store of the default group that no other thread can block."""
    store = dist.distributed_c10d._get_default_store().clone()
    store.set_timeout(timedelta(seconds=_STORE_SECONDS))
    return store


def _stacks() -> list[str]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for identity, frame in sys._current_frames().items():
        if identity == threading.get_ident():
            continue
        lines.append(f"thread {names.get(identity, identity)}, most recent call last:")
        lines += "".join(traceback.format_stack(frame)).splitlines()
    return lines


def _place(frame: FrameType | None) -> str:
    """The innermost line of ours that is being executed, or of anybody's."""
    if frame is None:
        return "an unknown place"
    calls = traceback.extract_stack(frame)
    ours = [call for call in calls if _OURS in Path(call.filename).parents]
    call = (ours or calls)[-1]
    return f"{Path(call.filename).name}:{call.lineno} in {call.name} ({call.line})"


def _short(error: BaseException) -> str:
    return str(error).splitlines()[0][:100] if str(error) else type(error).__name__
