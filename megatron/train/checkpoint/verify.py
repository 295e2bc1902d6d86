"""Is a checkpoint whole? And which one to load: the one that was asked for, or the newest whole one.

Note "Whole". `checksums.json` lists every file of a checkpoint. A quick look compares the names and sizes of all, and
the sums of the small ones (`.metadata`, `run.json`); a full one reads every byte. A checkpoint without that list
(written by another program) is measured against the sizes in its `.metadata`.
"""

from __future__ import annotations

import functools
import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from megatron.train.checkpoint.files import (
    CHECKSUM_FILE,
    MARKER,
    METADATA_FILE,
    RUN_FILE,
    existing_directory,
    iterations_in,
    latest_iteration,
)
from megatron.train.checkpoint.ranks import Ranks
from megatron.train.checkpoint.record import read_record_of
from megatron.train.checkpoint.shard import FileSum, sum_of

SMALL_FILES = (METADATA_FILE, RUN_FILE)
_CONVERT = "convert it with megatron.tools.convert_checkpoint from-megatron-core"
# What a run and its launch script may leave in --save before the first checkpoint.
_BESIDE = (
    "iter_*",
    "non_persistent",
    "wandb*",
    "*tensorboard*",
    "*.tfevents.*",
    "*log*",
    "*metrics*",
    "*.jsonl",
    "*.out",
    "*.err",
    "*.sh",
    "*trace*",
    "*profile*",
    "*snapshot*",
    "*cache*",
)
# What unpickling foreign bytes may raise.
_UNREADABLE = (
    OSError,
    EOFError,
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    ImportError,
    LookupError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True)
class Found:
    """The checkpoint to load; `warnings` say which newer ones were passed over, and why."""

    iteration: int
    warnings: tuple[str, ...] = ()


def read_metadata(directory: Path, flag: str = "--load") -> Metadata:
    """torch's description of a checkpoint. Raises ValueError naming the file if it cannot be read."""
    try:
        metadata = dcp.FileSystemReader(directory).read_metadata()
        if not isinstance(metadata, Metadata):
            raise TypeError("it holds something else")
        return metadata
    except _UNREADABLE as error:
        raise ValueError(
            f"{flag}: {directory / METADATA_FILE} is missing or damaged ({type(error).__name__}); load another "
            "iteration with --ckpt-step"
        ) from None


def read_sums(directory: Path) -> dict[str, FileSum] | None:
    """The sums of `checksums.json`; None where there is none. Raises ValueError naming a damaged one."""
    path = directory / CHECKSUM_FILE
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["files"]
        return {name: FileSum(int(one["size"]), str(one["sha256"])) for name, one in files.items()}
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__})") from None


def faults(directory: Path, *, contents: bool = False, part: tuple[int, int] = (0, 1)) -> list[str]:
    """What is wrong with a checkpoint, "path cause" each; empty: it is whole (note "Whole").

    Args:
        directory: of the checkpoint.
        contents: also compare every byte with the sums.
        part: (rank, size): read the contents of this share of the files only.
    """
    if not directory.is_dir():
        return [f"{directory} {'is no directory' if directory.exists() else 'is missing'}"]
    try:
        sums = read_sums(directory)
    except ValueError as error:
        return [str(error)]
    if sums is None:
        return _faults_by_metadata(directory)
    found = [
        f"{directory / name} is missing from {directory / CHECKSUM_FILE}"
        for name in SMALL_FILES
        if name not in sums
    ]
    for index, (name, expected) in enumerate(sorted(sums.items())):
        read = name in SMALL_FILES or (contents and index % part[1] == part[0])
        fault = _fault_of(directory / name, expected, read)
        found += [f"{directory / name} {fault}"] if fault else []
    return found


def _fault_of(path: Path, expected: FileSum, read: bool) -> str | None:
    try:
        size = path.stat().st_size
        if size != expected.size:
            return f"has {size} bytes instead of {expected.size}"
        if read and sum_of(path) != expected:
            return "is damaged: its content does not match its checksum"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None


def _faults_by_metadata(directory: Path) -> list[str]:
    foreign = _foreign_checkpoint(directory)
    if foreign is not None:
        return [foreign]
    for name in SMALL_FILES:
        if not (directory / name).is_file():
            return [f"{directory / name} is missing"]
    try:
        read_record_of(directory)
        storage: Mapping[Any, Any] = read_metadata(directory).storage_data or {}
    except ValueError as error:
        return [str(error).removeprefix("--load: ")]
    least: dict[str, int] = {}
    for info in storage.values():
        end = info.offset + info.length
        least[info.relative_path] = max(least.get(info.relative_path, 0), end)
    found = []
    for name, size in sorted(least.items()):
        path = directory / name
        if not path.is_file():
            found.append(f"{path} is missing")
        elif path.stat().st_size < size:
            found.append(f"{path} has {path.stat().st_size} bytes instead of {size}")
    return found


@dataclass(frozen=True)
class ChoiceOptions:
    """Which checkpoint is wanted.

    step: --ckpt-step: this one or none. Otherwise the one that the marker names, or the newest whole one before it.
    contents: read every byte of what is chosen: torch itself loads flipped bits without a word. bad: iterations that
    were found damaged in another way, and how. flag: named in messages.
    """

    step: int | None = None
    contents: bool = False
    bad: Mapping[int, str] = field(default_factory=dict)
    flag: str = "--load"


def find_checkpoint(root: str | Path, options: ChoiceOptions = ChoiceOptions()) -> Found | None:
    """The checkpoint of `root`, the --save directory of a run, to load, after a quick look at its files.

    Returns None where `root` holds nothing yet.

    Raises ValueError, naming file and cause: `root` is something else, or nothing in it is whole.
    """
    path, step, flag = Path(root), options.step, options.flag
    if path.exists() and not path.is_dir():
        raise ValueError(f"{flag} {path} is a file; give the --save directory of a run")
    present, marked, marker_fault = iterations_in(path), None, None
    if step is None:
        try:
            marked = latest_iteration(path, flag)
        except ValueError as error:
            if not present:
                raise
            marker_fault = str(error).removeprefix(f"{flag}: ").split(";")[0]
        if marked is None and not present:
            _refuse_other_content(path, flag)
            return None
    elif not existing_directory(path, step).is_dir():
        read_record_of(existing_directory(path, step), flag)  # says what is missing
    candidates = [step] if step is not None else sorted({*present, *([marked] if marked is not None else [])})
    if marked is not None:
        candidates = [iteration for iteration in candidates if iteration <= marked]
    elif step is None:
        marker_fault = marker_fault or f"{path / MARKER} is missing"
    warnings = [] if marker_fault is None else [marker_fault]
    for iteration in reversed(candidates):
        known = options.bad.get(iteration)
        found = [known] if known else faults(existing_directory(path, iteration))
        if not found:
            return Found(iteration, tuple(warnings))
        warnings.append(found[0])
    raise ValueError(f"{flag}: {_list(warnings)}; {_advice(step, present)}")


def choose_checkpoint(root: str, ranks: Ranks, options: ChoiceOptions) -> Found | None:
    """As `find_checkpoint`, decided by the first rank for all; collective.

    With `contents`, each rank reads its share of the files.
    """
    while True:
        found = ranks.from_first(functools.partial(find_checkpoint, root, options))
        if found is None or not options.contents:
            return found
        directory = existing_directory(root, found.iteration)
        mine = faults(directory, contents=True, part=(ranks.rank, ranks.size))
        wrong = [fault for one in ranks.all_gather(mine) for fault in one]
        if not wrong:
            return found
        options = replace(options, bad={**options.bad, found.iteration: wrong[0]})


def _list(warnings: Sequence[str]) -> str:
    return "; ".join(warnings[:3]) + (f"; and {len(warnings) - 3} more" if len(warnings) > 3 else "")


def _advice(step: int | None, present: Sequence[int]) -> str:
    if step is None:
        return "no checkpoint there is whole: give another --load"
    others = [str(iteration) for iteration in present if iteration != step]
    return (
        f"load another iteration with --ckpt-step ({', '.join(others)})" if others else "give another --load"
    )


def _refuse_other_content(path: Path, flag: str) -> None:
    """A folder of something else is an error: starting from the beginning would look like loading it."""
    if (path / RUN_FILE).is_file():
        raise ValueError(
            f"{flag} {path} is one checkpoint and not the --save directory of a run (it holds {RUN_FILE}); give "
            f"the directory above it, with --ckpt-step for an older one"
        )
    foreign = _foreign_checkpoint(path)
    if foreign is not None:
        raise ValueError(f"{flag} {foreign}")
    names = sorted(p.name for p in path.glob("*") if not p.name.startswith(".") and p.name != "lost+found")
    weights = [name for name in names if name.endswith((".safetensors", ".bin", ".pt", ".distcp"))]
    if weights or (names and not any(fnmatch(name, pattern) for name in names for pattern in _BESIDE)):
        raise ValueError(
            f"{flag} {path} is not the --save directory of a run (it holds {(weights or names)[0]} and no {MARKER}); "
            "give the one of a run, or an empty or new folder to start from the beginning; convert foreign "
            "checkpoints with megatron.tools.convert_checkpoint"
        )


def _foreign_checkpoint(directory: Path) -> str | None:
    """ "path cause" if this is a checkpoint of megatron-core; None otherwise."""
    if next(directory.glob("mp_rank_*"), None) is not None:
        return (
            f"{directory} is a checkpoint of Megatron-LM in its format torch (it holds mp_rank_*); save it once more "
            f"with --ckpt-format torch_dist and {_CONVERT}"
        )
    ours = (directory / RUN_FILE).exists() or (directory / CHECKSUM_FILE).exists()
    held = [name for name in ("common.pt", METADATA_FILE) if (directory / name).is_file() and not ours]
    return (
        f"{directory} is a checkpoint of another program (it holds {held[0]}); {_CONVERT}" if held else None
    )
