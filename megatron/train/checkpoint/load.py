"""Load: fill this run's tensors from a checkpoint of any layout, and say what does not fit.

Note "Names that do not fit" (--dist-ckpt-strictness, Megatron-LM's values). *Unexpected*: this run asks for it and the
checkpoint lacks it. *Missing*: the checkpoint has it and no rank asks for it.

| value                                  | unexpected                   | missing |
|----------------------------------------|------------------------------|---------|
| assume_ok_unexpected, raise_unexpected | an error                     | fine    |
| log_unexpected, return_unexpected      | told; keeps its present value | fine    |
| log_all, return_all                    | told; keeps its present value | told    |
| raise_all                              | an error                     | an error |
| ignore_all                             | keeps its present value      | fine    |
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import _create_read_items

from megatron.train.checkpoint.files import METADATA_FILE, existing_directory
from megatron.train.checkpoint.ranks import Ranks, reason_of
from megatron.train.checkpoint.reader import NamingReader, UnreadableFileError
from megatron.train.checkpoint.verify import read_metadata

Reaction = Literal["fail", "tell", "ignore"]

# (unexpected, missing): note "Names that do not fit".
STRICTNESS: dict[str, tuple[Reaction, Reaction]] = {
    "assume_ok_unexpected": ("fail", "ignore"),
    "log_unexpected": ("tell", "ignore"),
    "log_all": ("tell", "tell"),
    "raise_unexpected": ("fail", "ignore"),
    "raise_all": ("fail", "fail"),
    "return_unexpected": ("tell", "ignore"),
    "return_all": ("tell", "tell"),
    "ignore_all": ("ignore", "ignore"),
}


class DamagedCheckpointError(ValueError):
    """A file of the checkpoint cannot be read; an older checkpoint may be whole."""


@dataclass(frozen=True)
class LoadOptions:
    """How to load.

    strictness: a key of STRICTNESS. not_wanted: prefixes of keys that are left in the checkpoint on purpose.
    flag: named in messages.
    """

    strictness: str = "assume_ok_unexpected"
    not_wanted: tuple[str, ...] = ("rng/",)
    flag: str = "--load"


def read_shapes(
    root: str | Path, iteration: int, flag: str = "--load"
) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Size and dtype of every tensor of a checkpoint, by name.

    Raises ValueError naming the file if that cannot be read.
    """
    metadata = read_metadata(existing_directory(root, iteration), flag)
    return {
        name: (entry.size, entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def load_tensors(
    root: str | Path, iteration: int, tensors: dict[str, Any], options: LoadOptions = LoadOptions()
) -> list[str]:
    """Fill `tensors` (in place) from a checkpoint; collective.

    Returns: lines for the log on names that do not fit.

    Raises ValueError naming what does not fit (a shape never may), DamagedCheckpointError naming the file.
    """
    directory, flag = existing_directory(root, iteration), options.flag
    if not (directory / METADATA_FILE).is_file():
        raise DamagedCheckpointError(
            f"{flag}: {directory} has no {METADATA_FILE}, so it is no complete checkpoint; give another --ckpt-step"
        )
    wanted, lines = _that_fit(read_metadata(directory, flag), tensors, directory, options)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a single process is a run like any other
            dcp.load(wanted, storage_reader=NamingReader(directory), planner=_GlobalShapeLoadPlanner())
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        unreadable = sorted({str(cause) for cause in causes if isinstance(cause, UnreadableFileError)})
        if unreadable:
            raise DamagedCheckpointError(f"{flag}: {'; '.join(unreadable)}") from error
        raise ValueError(
            f"{flag}: {directory} does not fit this run ({'; '.join(sorted({_words(one) for one in causes}))}): it "
            "may be of another model; load another iteration with --ckpt-step"
        ) from error
    tensors.update(wanted)
    return lines


def _words(cause: BaseException) -> str:
    return str(cause) if isinstance(cause, ValueError) else reason_of(cause)


def _that_fit(
    metadata: Metadata, tensors: dict[str, Any], directory: Path, options: LoadOptions
) -> tuple[dict[str, Any], list[str]]:
    """What of `tensors` the checkpoint has; collective unless nothing is asked of the names."""
    on_unexpected, on_missing = STRICTNESS[options.strictness]
    if (on_unexpected, on_missing) == ("fail", "ignore"):
        return dict(tensors), []  # the planner fails, naming them
    there = metadata.state_dict_metadata
    asked = set().union(*Ranks().all_gather(set(tensors)))
    unexpected = sorted(asked - there.keys())
    missing = sorted(name for name in there.keys() - asked if not name.startswith(options.not_wanted))
    lines: list[str] = []
    errors: list[str] = []
    for names, reaction, words in (
        (unexpected, on_unexpected, "lacks"),
        (missing, on_missing, "has, and this run does not want,"),
    ):
        if names and reaction != "ignore":
            text = f"{directory} {words} {_some(names)}"
            (errors if reaction == "fail" else lines).append(text)
    if errors:
        raise ValueError(
            f"{options.flag}: {'; '.join(errors)}; --dist-ckpt-strictness {options.strictness} forbids it"
        )
    return {name: value for name, value in tensors.items() if name in there}, lines


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


class _GlobalShapeLoadPlanner(DefaultLoadPlanner):
    """Compares sizes in the whole model: a DTensor of ours may be tensor parallel or hold padding rows."""

    def create_local_plan(self) -> LoadPlan:
        """One read per box that this rank holds."""
        assert self.metadata is not None
        items, lacking = (
            [],
            [name for name in self.state_dict if name not in self.metadata.state_dict_metadata],
        )
        if lacking:
            raise ValueError(f"{_some(lacking)} {'is' if len(lacking) == 1 else 'are'} missing")
        for name, value in self.state_dict.items():
            entry = self.metadata.state_dict_metadata[name]
            if isinstance(entry, TensorStorageMetadata) and isinstance(value, torch.Tensor):
                info = getattr(value, "shard_info", None)
                shape = value.shape if info is None else info.location.global_shape
                if tuple(entry.size) != tuple(shape):
                    raise ValueError(f"{name} has shape {tuple(entry.size)} there, {tuple(shape)} here")
            items += _create_read_items(name, entry, value)
        return LoadPlan(items)
