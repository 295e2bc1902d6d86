"""Save: everything that training changes, in a directory per iteration, at once or behind the next steps.

Note "Always one good checkpoint". A checkpoint is written into `iter_N.partial`. When every rank has written and synced
its file, the first one adds `.metadata`, `run.json` and `checksums.json`, syncs them and the folder, and renames it;
only then does the marker name it, by an atomic rename. What goes wrong before that (a full disk) removes the partial
directory, leaves marker and older checkpoints alone, and is one line on every rank. Where the same iteration was there
before, it keeps its place until the new one is complete, and is found under its old name between the two renames.
Retention runs last and never touches what the marker names.

Note "Two rounds". A save talks twice whatever the number of tensors: gather plans and scatter shares, at the call;
gather results and broadcast the outcome, when the files are written. Both run on a group of their own, on the CPU.

Note "In the background" (--async-save). Between the rounds this rank's share is copied to host memory (shard.py: one
copy of the shard, its buffers kept for the next save); the second round runs in a thread while training goes on. One
save is under way at a time: the next one waits for it. An error there is raised by the next `save` or `finish`, and
`failed` tells of it before, so that the ranks can agree to stop at the same step.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from megatron.train.checkpoint.files import (
    CHECKSUM_FILE,
    MARKER,
    METADATA_FILE,
    OLD,
    PARTIAL,
    RUN_FILE,
    directory_of,
    latest_iteration,
    sync_directory,
    write_durably,
)
from megatron.train.checkpoint.plan import PlanCache, local_plan
from megatron.train.checkpoint.ranks import Ranks, RanksFailed
from megatron.train.checkpoint.record import RunRecord
from megatron.train.checkpoint.retention import Retention, delete_old
from megatron.train.checkpoint.shard import (
    FileSum,
    Staging,
    Written,
    live_source,
    sum_of,
    write_metadata,
    write_shard,
)
from megatron.train.errors import RunStopped


@dataclass(frozen=True)
class Target:
    """Where a checkpoint goes, and what becomes of older ones beside it.

    root: --save, a directory that all ranks share. record: the readable half; the first rank's is written.
    """

    root: Path
    record: RunRecord
    retention: Retention = field(default_factory=Retention)

    @property
    def directory(self) -> Path:
        """The checkpoint's."""
        return directory_of(self.root, self.record.progress.iteration)

    @property
    def partial(self) -> Path:
        """Where it is written."""
        return self.directory.with_name(self.directory.name + PARTIAL)


def save_checkpoint(
    root: str | Path,
    tensors: Mapping[str, Any],
    record: RunRecord,
    *,
    retain_interval: int | None = None,
) -> Path:
    """Write one checkpoint; collective. Returns its directory. A run that saves again keeps a `Saver`.

    Args: as `Saver.save` and `Retention`.

    Raises RunStopped: it could not be written; the previous checkpoint is intact.
    """
    target = Target(Path(root), record, Retention(retain_interval))
    return Saver(Ranks()).save(target, tensors)


class Saver:
    """Writes the checkpoints of a run; every call is collective over `ranks`.

    Args:
        ranks: that save; nothing else may use their group.
        background: write while training goes on (note "In the background").
    """

    def __init__(self, ranks: Ranks, *, background: bool = False) -> None:
        self.ranks = ranks
        self.background = background
        self.plans = PlanCache()
        self.staging = Staging()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._pending: Target | None = None
        self._finished: list[Target] = []

    @property
    def failed(self) -> bool:
        """Whether a background save has failed, so that `finish` will raise."""
        return self._error is not None

    def save(self, target: Target, tensors: Mapping[str, Any]) -> Path:
        """Write a checkpoint, or begin to. Returns the directory that it has, or will have.

        Args:
            target: where.
            tensors: for torch.distributed.checkpoint: DTensors, tensors and objects, by unique names.

        Raises RunStopped: it, or the one before in the background, could not be written; the last one that could
        is intact.
        """
        self.finish()
        plan, metadata = self._plan(target, tensors)
        if not self.background:
            self._write(target, plan, metadata, live_source(tensors))
            self._finished.append(target)
            return target.directory
        with torch.profiler.record_function("checkpoint.stage"):
            source = self.staging.copy(tensors, plan)
        self._pending = target
        self._thread = threading.Thread(
            target=self._write_behind, args=(target, plan, metadata, source), name="save", daemon=True
        )
        self._thread.start()
        return target.directory

    def take_finished(self) -> list[Target]:
        """The checkpoints that were completed since the last call."""
        done, self._finished = self._finished, []
        return done

    def finish(self) -> None:
        """Wait for the save under way. Raises RunStopped if it failed."""
        self.wait()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait(self) -> None:
        """Wait for the save under way, however it ends."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _plan(self, target: Target, tensors: Mapping[str, Any]) -> tuple[SavePlan, Metadata | None]:
        """The first round: this rank's share, and on the first rank what describes the whole."""
        local = None

        def offer() -> SavePlan | None:
            nonlocal local
            local = local_plan(tensors)
            return self.plans.offer(local)

        def decide(offers: list[SavePlan | None]) -> Any:
            _make_empty(target.partial)
            return self.plans.decide(offers)

        try:
            with torch.profiler.record_function("checkpoint.plan"):
                answer = self.ranks.map_scatter(offer, decide)
        except RanksFailed as failure:
            raise _stopped(target, failure) from failure
        assert local is not None
        plan = self.plans.accept(local, answer)
        return plan, self.plans.metadata() if self.ranks.rank == 0 else None

    def _write(self, target: Target, plan: SavePlan, metadata: Metadata | None, source: SavePlanner) -> None:
        """The second round."""

        def complete(written: list[Written]) -> None:
            assert metadata is not None
            publish(target, metadata, written)

        try:
            with torch.profiler.record_function("checkpoint.write"):
                self.ranks.map_broadcast(lambda: write_shard(target.partial, plan, source), complete)
        except RanksFailed as failure:
            if self.ranks.rank == 0:
                shutil.rmtree(target.partial, ignore_errors=True)
            raise _stopped(target, failure) from failure

    def _write_behind(
        self, target: Target, plan: SavePlan, metadata: Metadata | None, source: SavePlanner
    ) -> None:
        try:
            self._write(target, plan, metadata, source)
            self._finished.append(target)
        except Exception as error:
            self._error = error


def publish(target: Target, metadata: Metadata, written: list[Written]) -> None:
    """Turn a partial directory with every rank's file into the checkpoint that the marker names.

    metadata: from plan.merge_plans. written: by rank, from shard.write_shard.
    """
    partial, directory, record = target.partial, target.directory, target.record
    sums = {name: value for one in written for name, value in one.sums.items()}
    sums |= write_metadata(partial, metadata, [one.results for one in written])
    write_durably(partial / RUN_FILE, json.dumps(asdict(record), indent=1, default=str))
    sums[RUN_FILE] = sum_of(partial / RUN_FILE)
    write_sums(partial, sums)
    old = directory.with_name(directory.name + OLD)
    if directory.exists():
        shutil.rmtree(old, ignore_errors=True)
        directory.rename(old)
    partial.rename(directory)
    sync_directory(directory.parent)
    shutil.rmtree(old, ignore_errors=True)
    write_durably(directory.parent / MARKER, f"{record.progress.iteration}")
    delete_old(target.root, record.progress.iteration, target.retention)


def write_sums(directory: Path, sums: Mapping[str, FileSum]) -> None:
    """Write `checksums.json`; the folder and its names are on disk when it returns."""
    assert METADATA_FILE in sums
    files = {name: asdict(sums[name]) for name in sorted(sums)}
    write_durably(directory / CHECKSUM_FILE, json.dumps({"files": files}, indent=1))


def _make_empty(directory: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True)


def _stopped(target: Target, failure: RanksFailed) -> RunStopped:
    return RunStopped(
        f"--save {target.root}: the checkpoint {target.directory.name} could not be written ({failure}). "
        f"{_what_is_left(target.root)}"
    )


def _what_is_left(root: Path) -> str:
    latest = None
    with contextlib.suppress(ValueError):
        latest = latest_iteration(root, "--save")
    if latest is None:
        return "Make room or give another --save"
    return (
        f"The checkpoint of iteration {latest} is still good: make room, or give another --save and --load it"
    )
