"""Reads pickles of other programs without their classes: what is not torch's or Python's own becomes a `Foreign`.

Megatron-LM's checkpoints hold enumerations, functions and plans of the version that wrote them; nothing of it need be
installed, is imported or runs.
"""

from __future__ import annotations

import importlib
import io
import pickle
from types import SimpleNamespace
from typing import IO, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

_KNOWN = (
    "argparse",
    "builtins",
    "collections",
    "copyreg",
    "_codecs",
    "datetime",
    "numpy",
    "pathlib",
    "torch",
)


class Foreign:
    """An object of a class that is not here: its name is kept, its contents are not."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Takes what the class took."""

    def __setstate__(self, state: object) -> None:
        """Takes the attributes of the object."""

    def __setitem__(self, key: object, value: object) -> None:
        """Takes an item of a mapping's subclass."""

    def append(self, value: object) -> None:
        """Takes an item of a list's subclass."""

    def extend(self, values: object) -> None:
        """Takes items of a list's subclass."""


def is_foreign(value: object) -> bool:
    """Whether a value of a pickle stands for an object, a class or a function that is not here."""
    return isinstance(value, Foreign) or (isinstance(value, type) and issubclass(value, Foreign))


class Unpickler(pickle.Unpickler):
    """Finds classes of torch, NumPy and Python; for others, and for functions of Python, a subclass of `Foreign`."""

    def find_class(self, module: str, name: str) -> Any:
        """The class, or what stands for it."""
        if module.partition(".")[0] in _KNOWN:
            try:
                found: Any = importlib.import_module(module)
                for part in name.split("."):
                    found = getattr(found, part)
            except (ImportError, AttributeError):
                found = None
            if found is not None and (module != "builtins" or isinstance(found, type)):
                return found
        return type(name, (Foreign,), {"__module__": module})


def load(source: IO[bytes] | str, **_options: object) -> Any:
    """Every value that torch.save wrote to a file (a path, or an open one), on CPU."""
    pickles = SimpleNamespace(
        __name__="pickle", Unpickler=Unpickler, load=lambda file, **options: Unpickler(file, **options).load()
    )
    return torch.load(source, map_location="cpu", weights_only=False, pickle_module=pickles)


class Reader(dcp.FileSystemReader):
    """Reads `.metadata` without the classes of the program that wrote it."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """As torch's. Raises pickle.UnpicklingError for a file that holds something else."""
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            metadata = Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"holds a {type(metadata).__name__}")
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self.load_id
        return metadata


class ObjectPlanner(DefaultLoadPlanner):
    """Reads objects that are no tensors."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put the object in its place."""
        self.state_dict[read_item.dest_index.fqn] = load(value)
