"""Reads the files of a checkpoint: names the one that cannot be read; gives single tensors, whole, on the host."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from megatron.train.checkpoint.verify import read_metadata


class CheckpointReader:
    """Whole tensors of one checkpoint, one at a time, on one process; for tools.

    Args:
        directory: of the checkpoint (iter_*).

    Raises ValueError naming the file if `.metadata` cannot be read.
    """

    def __init__(self, directory: Path, flag: str = "--load") -> None:
        self.directory, self.flag = directory, flag
        self.metadata = read_metadata(directory, flag)
        self.tensors: dict[str, TensorStorageMetadata] = {
            name: entry
            for name, entry in sorted(self.metadata.state_dict_metadata.items())
            if isinstance(entry, TensorStorageMetadata)
        }
        self.objects = sorted(self.metadata.state_dict_metadata.keys() - self.tensors.keys())

    def tensor(self, name: str) -> Tensor:
        """One whole tensor. Raises ValueError naming a damaged file, KeyError for another name."""
        entry = self.tensors[name]
        value = {name: torch.zeros(entry.size, dtype=entry.properties.dtype)}
        reader, planner = NamingReader(self.directory), DefaultLoadPlanner(flatten_state_dict=False)
        reader.set_up_storage_reader(self.metadata, is_coordinator=True)
        planner.set_up_planner(value, self.metadata, is_coordinator=True)
        try:
            reader.read_data(planner.create_local_plan(), planner).wait()
        except UnreadableFileError as error:
            raise ValueError(f"{self.flag}: {error}") from error
        return value[name]


class UnreadableFileError(RuntimeError):
    """A file of a checkpoint and why it cannot be read; travels between ranks."""


class NamingReader(dcp.FileSystemReader):
    """Names the file that cannot be read."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.fs = self._files = _Files()

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the items of a plan."""
        try:
            return super().read_data(plan, planner)
        except Exception as error:
            name = self._files.current
            raise UnreadableFileError(
                f"{name} is missing"
                if isinstance(error, FileNotFoundError)
                else f"{name} is damaged ({_cause(error)})"
            ) from error


class _Files(FileSystem):
    def __init__(self) -> None:
        self.current: Path | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """A stream for one file, which is remembered."""
        self.current = Path(path)
        with super().create_stream(path, mode) as stream:
            yield stream


def _cause(error: Exception) -> str:
    """The first sentence of an error, without torch's C++ stack."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".split(" Exception raised from")[0][:200]
