"""Cached indices: built once, whole, by whoever comes first (D08)."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from megatron.train.data.cache import Arrays, CacheEntry, cached_arrays


def entry(folder: Path) -> CacheEntry:
    return CacheEntry(folder, "key", ("a", "b"), "made by a test")


def arrays() -> Arrays:
    return np.arange(1000), np.arange(4000, dtype=np.int32).reshape(-1, 2)


def never() -> Arrays:
    raise AssertionError("built although it was there")


def equal(found: Arrays) -> bool:
    return all(np.array_equal(f, a) and f.dtype == a.dtype for f, a in zip(found, arrays(), strict=True))


def test_built_once_then_mapped(tmp_path: Path) -> None:
    assert equal(cached_arrays(entry(tmp_path), arrays))
    found = cached_arrays(entry(tmp_path), never)
    assert equal(found) and all(isinstance(array, np.memmap) for array in found)
    assert not list(tmp_path.glob("*.tmp"))


def test_no_cache_builds_in_memory() -> None:
    assert equal(cached_arrays(None, arrays))


@pytest.mark.parametrize("name", ["key-a.npy", "key-b.npy", "key-description.txt"])
@pytest.mark.parametrize("size", [None, 0, 40, 300])
def test_partial_files_are_built_again(tmp_path: Path, name: str, size: int | None) -> None:
    """D08: whatever a kill, or another program's plain writes, left behind."""
    cached_arrays(entry(tmp_path), arrays)
    path = tmp_path / name
    path.unlink() if size is None else os.truncate(path, size)
    built: list[int] = []
    assert equal(cached_arrays(entry(tmp_path), lambda: built.append(1) or arrays()))
    # A description of the wrong length still says that the arrays are there.
    assert len(built) == (0 if name.endswith(".txt") and size is not None else 1)
    assert equal(cached_arrays(entry(tmp_path), never))


def test_arrays_that_do_not_fit_are_built_again(tmp_path: Path) -> None:
    cached_arrays(entry(tmp_path), lambda: (np.arange(3), np.arange(3)))
    assert equal(cached_arrays(entry(tmp_path), arrays, lambda found: len(found[0]) == 1000))


def test_separate_caches_need_nothing_from_each_other(tmp_path: Path) -> None:
    """D08: two nodes with disks of their own."""
    for node in ("node0", "node1"):
        assert equal(cached_arrays(entry(tmp_path / node), arrays))


def build_slowly(folder: Path, log: Path) -> None:
    def build() -> Arrays:
        with open(log, "a") as file:
            file.write("built\n")
        time.sleep(0.3)
        return arrays()

    assert equal(cached_arrays(entry(folder), build))


def test_jobs_that_share_a_cache_build_it_once(tmp_path: Path) -> None:
    """D08: a race of four processes."""
    context = get_context("fork")
    jobs = [
        context.Process(target=build_slowly, args=(tmp_path / "cache", tmp_path / "log")) for _ in range(4)
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(30)
    assert [job.exitcode for job in jobs] == [0] * 4
    assert (tmp_path / "log").read_text() == "built\n"


def die_while_building(folder: Path) -> None:
    def build() -> Arrays:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    (folder / ".key-left-over.tmp").write_bytes(b"half")
    cached_arrays(entry(folder), build)


def test_a_killed_builder_blocks_nobody(tmp_path: Path) -> None:
    """D08: its lock ends with it, and what it left is cleaned up."""
    job = get_context("fork").Process(target=die_while_building, args=(tmp_path,))
    job.start()
    job.join(30)
    assert job.exitcode == -signal.SIGKILL
    assert equal(cached_arrays(entry(tmp_path), arrays))
    assert not list(tmp_path.glob(".*.tmp"))


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="--data-cache-path"):
        assert equal(cached_arrays(entry(tmp_path / "file" / "cache"), arrays))


def test_a_full_disk_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.warns(UserWarning, match="No space left on device"):
        assert equal(cached_arrays(entry(tmp_path), arrays))
    assert not list(tmp_path.glob(".*.tmp"))


def test_an_error_of_the_builder_is_not_hidden(tmp_path: Path) -> None:
    def wrong() -> Arrays:
        raise ValueError("--split is wrong")

    with pytest.raises(ValueError, match="--split"):
        cached_arrays(entry(tmp_path), wrong)
