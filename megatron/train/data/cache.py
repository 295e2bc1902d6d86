"""Index arrays kept on disk between runs: built once, by whoever comes first, and never seen half written.

Rules. No rank waits for another through a collective, so an error on one cannot hang the rest, and nodes with
caches of their own need no agreement. Whoever needs an index takes a file lock beside it: ranks of one node,
nodes on a shared file system and other jobs alike; the first builds, the rest load. Files appear by rename,
the description last; a file that cannot be read or does not fit is built again. Where a file system has no
locks, several may build: they write the same bytes, and rename keeps readers safe. A cache that cannot be
written is a warning, not an error.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

Arrays = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class CacheEntry:
    """Where a set of arrays lies.

    Attributes:
        folder: the cache; made if absent.
        key: unique to the content; the beginning of each file's name.
        names: of the arrays, in order.
        description: text for people, written beside them.
    """

    folder: Path
    key: str
    names: tuple[str, ...]
    description: str

    def path(self, name: str) -> Path:
        """Return the file of the array ``name``."""
        return self.folder / f"{self.key}-{name}.npy"

    @property
    def description_path(self) -> Path:
        """The description; its presence says that the arrays are complete."""
        return self.folder / f"{self.key}-description.txt"


def cached_arrays(
    entry: CacheEntry | None,
    build: Callable[[], Arrays],
    fits: Callable[[Arrays], bool] = lambda arrays: True,
) -> Arrays:
    """Return the arrays of ``entry``, memory-mapped, building and writing them if they are absent or
    unusable.

    Args:
        entry: None builds in memory.
        build: makes the arrays; must give the same ones wherever it runs.
        fits: whether loaded arrays are whole and belong together.
    """
    if entry is None:
        return build()
    found = _load(entry, fits)
    if found is not None:
        return found
    try:
        entry.folder.mkdir(parents=True, exist_ok=True)
        with _locked(entry.folder / f"{entry.key}.lock"):
            found = _load(entry, fits)
            if found is not None:
                return found
            arrays = build()
            return _store(entry, arrays, fits)
    except OSError as error:
        warnings.warn(
            f"the sample index could not be kept in {entry.folder} ({error.strerror or error}); it is built "
            "in memory. "
            "Pass --data-cache-path with a folder that can be written",
            stacklevel=2,
        )
        return build()


def _load(entry: CacheEntry, fits: Callable[[Arrays], bool]) -> Arrays | None:
    if not entry.description_path.is_file():
        return None
    try:
        arrays = tuple(np.load(entry.path(name), mmap_mode="r", allow_pickle=False) for name in entry.names)
    except (OSError, ValueError, EOFError):
        return None
    return arrays if fits(arrays) else None


def _store(entry: CacheEntry, arrays: Arrays, fits: Callable[[Arrays], bool]) -> Arrays:
    for left_over in entry.folder.glob(f".{entry.key}-*.tmp"):
        left_over.unlink(missing_ok=True)
    entry.description_path.unlink(missing_ok=True)
    for name, array in zip(entry.names, arrays, strict=True):
        with _replacing(entry, entry.path(name)) as file:
            np.save(file, array, allow_pickle=False)
    with _replacing(entry, entry.description_path) as file:
        file.write(entry.description.encode())
    return _load(entry, fits) or arrays


@contextlib.contextmanager
def _replacing(entry: CacheEntry, path: Path) -> Iterator[BinaryIO]:
    """Give a temporary file that becomes ``path`` when the block ends well, and vanishes when it does not."""
    descriptor, name = tempfile.mkstemp(dir=entry.folder, prefix=f".{entry.key}-", suffix=".tmp")
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(descriptor)
        os.chmod(name, 0o644)  # temporary files are private; other users of the cache shall read it
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an advisory lock; the system frees it when its holder dies."""
    try:
        import fcntl
    except ImportError:  # no such locks on this system: see the note at the top
        yield
        return
    with open(path, "ab") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
