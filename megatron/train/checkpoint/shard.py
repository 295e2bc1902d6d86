"""One rank's file of a checkpoint: copied aside where training goes on, written, hashed and synced."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult


@dataclass(frozen=True)
class FileSum:
    """Size of a file in bytes and the SHA-256 of its content, in hexadecimal."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Written:
    """What a rank has written: torch's results, and the sums of its files by name."""

    results: list[WriteResult]
    sums: dict[str, FileSum]


def live_source(tensors: Mapping[str, Any]) -> SavePlanner:
    """A source that reads `tensors` as they are when they are written."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), is_coordinator=False)
    return planner


class StagedSource(DefaultSavePlanner):
    """A source that reads copies (see Staging). `wait` returns when they are complete."""

    def __init__(
        self, copies: Mapping[MetadataIndex, Tensor | bytes], ready: torch.cuda.Event | None
    ) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._copies = copies
        self._ready = ready

    def wait(self) -> None:
        """Return when the copies are complete."""
        if self._ready is not None:
            self._ready.synchronize()

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """The copy of an item."""
        copy = self._copies[write_item.index]
        return copy if isinstance(copy, Tensor) else io.BytesIO(copy)


class Staging:
    """Buffers in host memory for what this rank writes: one copy of its shard, kept from save to save.

    Only what the final plan gives this rank is copied. From a GPU the copies are asynchronous, into pinned memory, in
    the order of the current stream: what training does afterwards comes after them.
    """

    def __init__(self) -> None:
        self._buffers: dict[MetadataIndex, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def copy(self, tensors: Mapping[str, Any], plan: SavePlan) -> StagedSource:
        """Copy the items of `plan`."""
        live = live_source(tensors)
        old, self._buffers = self._buffers, {}
        copies: dict[MetadataIndex, Tensor | bytes] = {}
        on_gpu = False
        for item in plan.items:
            data = live.resolve_data(item)
            if item.type == WriteItemType.BYTE_IO:
                copies[item.index] = cast(io.BytesIO, data).getvalue()
                continue
            source = cast(Tensor, data).detach()
            buffer = old.pop(item.index, None)
            if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
                buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
            buffer.copy_(source, non_blocking=True)
            on_gpu |= source.is_cuda
            self._buffers[item.index] = copies[item.index] = buffer
        ready = None
        if on_gpu:
            ready = torch.cuda.Event()
            ready.record()
        return StagedSource(copies, ready)


def write_shard(directory: Path, plan: SavePlan, source: SavePlanner) -> Written:
    """Write the items of a final plan into this rank's file in `directory`; on disk when it returns.

    Raises OSError: the file cannot be written.
    """
    writer, files = _writer(directory)
    if isinstance(source, StagedSource):
        source.wait()
        writer.per_thread_copy_ahead = 0
    with files.true_cause():
        results = writer.write_data(plan, source).wait()
    return Written(results, files.sums)


def write_metadata(
    directory: Path, metadata: Metadata, results: list[list[WriteResult]]
) -> dict[str, FileSum]:
    """Write `.metadata` of a checkpoint whose ranks wrote `results`; returns its sum by name."""
    writer, files = _writer(directory)
    with files.true_cause():
        writer.finish(metadata, results)
    return {name.removesuffix(".tmp"): value for name, value in files.sums.items()}


def sum_of(path: Path) -> FileSum:
    """Size and sum of a file, read in pieces."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
            size += len(piece)
    return FileSum(size, digest.hexdigest())


def _writer(directory: Path) -> tuple[FileSystemWriter, _SummingFiles]:
    writer, files = FileSystemWriter(directory, sync_files=True), _SummingFiles()
    writer.fs = files
    return writer, files


class _SummingFiles(FileSystem):
    """Hashes what is written, and keeps the error that torch's serialisation would hide."""

    def __init__(self) -> None:
        self.sums: dict[str, FileSum] = {}
        self._streams: list[_SummingStream] = []

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """A stream for one file."""
        with Path(path).open(mode) as file:
            stream = _SummingStream(file)
            self._streams.append(stream)
            yield cast(io.IOBase, stream)
        self.sums[Path(path).name] = FileSum(stream.size, stream.digest.hexdigest())

    @contextmanager
    def true_cause(self) -> Iterator[None]:
        """Raise the OSError of a write itself."""
        try:
            yield
        except Exception as error:
            cause = next((stream.error for stream in self._streams if stream.error is not None), None)
            if cause is None:
                raise
            raise cause from error


class _SummingStream:
    def __init__(self, file: Any) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.size = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.digest.update(data)
        size = memoryview(data).nbytes
        self.size += size
        return size

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        self._file.flush()  # it is asked for to sync the file, and torch syncs .metadata unflushed
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()
