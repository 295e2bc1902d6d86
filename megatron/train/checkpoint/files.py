"""Names of files and folders of a checkpoint, and writes that a crash cannot tear.

SAVE/latest_checkpointed_iteration.txt      the iteration to resume from, as Megatron names it
SAVE/iter_0000100/run.json                  progress, arguments, model and schedule, readable
SAVE/iter_0000100/*.distcp, .metadata       weights, optimizer, random states (torch.distributed.checkpoint)
SAVE/iter_0000100/checksums.json            size and SHA-256 of every other file
SAVE/iter_0000100.partial                   one that is being written, or what a crash left of it
SAVE/iter_0000100.old                       the one that was there before, while the same iteration is saved again
"""

from __future__ import annotations

import os
from pathlib import Path

MARKER = "latest_checkpointed_iteration.txt"
RUN_FILE = "run.json"
CHECKSUM_FILE = "checksums.json"
METADATA_FILE = ".metadata"
PARTIAL, OLD = ".partial", ".old"
_PREFIX = "iter_"


def directory_of(root: str | Path, iteration: int) -> Path:
    """Where the checkpoint of `iteration` is put."""
    return Path(root) / f"{_PREFIX}{iteration:07d}"


def existing_directory(root: str | Path, iteration: int) -> Path:
    """Where the checkpoint of `iteration` is now: a crash while it was replaced leaves it under its old name."""
    directory = directory_of(root, iteration)
    old = directory.with_name(directory.name + OLD)
    return old if old.is_dir() and not directory.is_dir() else directory


def iterations_in(root: str | Path) -> list[int]:
    """Iterations that have a directory in `root`, whole or not, ascending; none for a root that is no directory."""
    found = set()
    for path in Path(root).glob(f"{_PREFIX}*"):
        number = path.name.removeprefix(_PREFIX).removesuffix(OLD)
        if number.isdigit() and path.is_dir():
            found.add(int(number))
    return sorted(found)


def latest_iteration(root: str | Path, flag: str = "--load") -> int | None:
    """The iteration that the marker in `root` names; None where there is no marker (nothing was saved yet).

    Raises ValueError for a marker that cannot be read.
    """
    marker = Path(root) / MARKER
    try:
        text = marker.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{flag}: {marker} cannot be read ({error}); check its permissions") from None
    if not text.isdigit():
        raise ValueError(
            f"{flag}: {marker} holds {text!r} instead of an iteration; write the number of one of the iter_* "
            "directories beside it into it, or give --ckpt-step"
        )
    return int(text)


def write_durably(path: Path, text: str) -> None:
    """Replace `path` in one go: after a crash it is the old file or the new one."""
    temporary = path.with_name(path.name + PARTIAL)
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Return when the names in `directory` are on disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
