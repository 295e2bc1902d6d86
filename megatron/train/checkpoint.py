"""Save and resume: everything that training changes, in a directory per iteration.

    SAVE/latest_checkpointed_iteration.txt      the iteration to resume from, as Megatron names it
    SAVE/iter_0000100/run.json                  progress, arguments, model and schedule, readable
    SAVE/iter_0000100/*.distcp, .metadata       weights, optimizer, random states
    (torch.distributed.checkpoint)

Note "Always one good checkpoint". A checkpoint is written into `iter_N.partial`, renamed when every rank
has written, and only then does the marker name it, by an atomic rename. What goes wrong before that (a full
disk) removes the partial directory, leaves marker and older checkpoints alone, and is one line on every
rank. Retention runs last and deletes only what is older than the marker.

Note "Any layout". Weights and optimizer state carry global names and offsets (megatron/fsdp/checkpoint.py)
and load under any number of ranks and strategy. Random states belong to a rank; they are restored where the
number of ranks is the same.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import _create_read_items

from megatron.train.errors import RunStopped

MARKER = "latest_checkpointed_iteration.txt"
RUN_FILE = "run.json"
FORMAT = 1

# Fields of the model's configuration that may differ between a checkpoint and the run that loads it: they
# do not change what the weights mean.
FREE_MODEL_FIELDS = frozenset(
    {
        "attention_dropout",
        "hidden_dropout",
        "recompute",
        "cp_comm_type",
        "init_method_std",
        "embedding_init_method_std",
        "init_method_xavier_uniform",
        "padded_vocab_size",
        "fp32_residual_connection",
        *(
            f"moe.{field}"
            for field in (
                "dispatcher",
                "flex_backend",
                "load_balancing",
                "aux_loss_coeff",
                "z_loss_coeff",
                "input_jitter_eps",
                "bias_update_rate",
                "router_dtype",
                "expert_capacity_factor",
                "pad_expert_input_to_capacity",
                "token_drop_policy",
            )
        ),
        "mtp.loss_scaling_factor",
    }
)


@dataclass(frozen=True)
class Progress:
    """How far a run has come. Samples are counted over all ranks."""

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    skipped_iterations: int = 0


@dataclass(frozen=True)
class RunRecord:
    """The readable half of a checkpoint.

    model: the model's configuration. data: what the data position belongs to. schedule, scaler: state_dicts.
    arguments: of the run that saved, for information and --use-checkpoint-args.
    """

    progress: Progress
    model: Mapping[str, Any]
    data: Mapping[str, Any]
    schedule: Mapping[str, Any]
    scaler: Mapping[str, Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    world_size: int = 1
    has_optimizer: bool = True
    has_rng: bool = True
    torch_version: str = torch.__version__
    format: int = FORMAT


def directory_of(root: str | Path, iteration: int) -> Path:
    """Where the checkpoint of `iteration` lies."""
    return Path(root) / f"iter_{iteration:07d}"


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


def save_checkpoint(
    root: str | Path,
    tensors: Mapping[str, Any],
    record: RunRecord,
    *,
    retain_interval: int | None = None,
) -> Path:
    """Write a checkpoint; collective. Returns its directory.

    Args:
        root: --save, a directory that all ranks share.
        tensors: for torch.distributed.checkpoint: DTensors, tensors and objects, by unique names.
        record: the readable half; rank 0's is written.
        retain_interval: delete older checkpoints whose iteration is no multiple of it; None keeps all.

    Raises:
        RunStopped: it could not be written; the previous checkpoint is intact.
    """
    root = Path(root)
    target = directory_of(root, record.progress.iteration)
    partial = target.with_name(target.name + ".partial")
    _on_rank_zero(lambda: _make_empty(partial), root, target)
    _all_ranks(lambda: _write_tensors(partial, tensors), root, target, partial)
    _on_rank_zero(lambda: _finalise(partial, target, record), root, target, partial)
    if retain_interval and _rank() == 0:
        _delete_old(root, record.progress.iteration, retain_interval)
    return target


def read_record(root: str | Path, iteration: int, flag: str = "--load") -> RunRecord:
    """The readable half of a checkpoint.

    Raises ValueError naming the file: it is missing, damaged or of another format.
    """
    path = directory_of(root, iteration) / RUN_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(
                f"{flag}: {path} has format {content['format']}, this program reads format {FORMAT}; "
                "use the version that wrote it"
            )
        return RunRecord(**{**content, "progress": Progress(**content["progress"])})
    except FileNotFoundError:
        raise ValueError(
            f"{flag}: {path} is missing, so there is no checkpoint of iteration {iteration}; give the "
            f"directory that holds {MARKER}, or another --ckpt-step"
        ) from None
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{flag}: {path} is damaged ({type(error).__name__}); load another iteration with --ckpt-step"
        ) from None


def check_same_model(record: RunRecord, model: Mapping[str, Any], flag: str = "--load") -> None:
    """Raise ValueError, listing what differs, if the checkpoint's weights are of another model."""
    there, here = _flat(record.model), _flat(json.loads(json.dumps(model)))
    names = sorted((set(there) | set(here)) - FREE_MODEL_FIELDS)
    different = [
        f"{name} is {there.get(name)} there, {here.get(name)} here"
        for name in names
        if there.get(name) != here.get(name)
    ]
    if different:
        raise ValueError(
            f"{flag}: the checkpoint is of another model ({'; '.join(different)}); give the model flags it "
            "was saved with, or another --load"
        )


def _flat(model: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the parts that only some models have, beside the model's own: "moe.num_experts"."""
    parts = ("moe", "mla", "mtp")
    flat = {name: value for name, value in model.items() if name not in parts}
    for part in parts:
        flat |= {f"{part}.{name}": value for name, value in (model.get(part) or {}).items()}
    return flat


def read_shapes(
    root: str | Path, iteration: int, flag: str = "--load"
) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Size and dtype of every tensor of a checkpoint, by name.

    Raises ValueError naming the directory if that cannot be read.
    """
    directory = directory_of(root, iteration)
    try:
        metadata = dcp.FileSystemReader(directory).read_metadata()
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"{flag}: {directory / '.metadata'} is missing or damaged ({type(error).__name__}); load another "
            "iteration with --ckpt-step"
        ) from None
    return {
        name: (entry.size, entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def load_tensors(root: str | Path, iteration: int, tensors: dict[str, Any], flag: str = "--load") -> None:
    """Fill `tensors` (in place) from a checkpoint; collective.

    Raises ValueError naming the directory if something is missing or damaged.
    """
    directory = directory_of(root, iteration)
    if not (directory / ".metadata").is_file():
        raise ValueError(
            f"{flag}: {directory} has no .metadata, so it is no complete checkpoint; give another --ckpt-step"
        )
    try:
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(directory), planner=_GlobalShapeLoadPlanner())
    except CheckpointException as error:
        reasons = {f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values()}
        raise ValueError(
            f"{flag}: {directory} cannot be loaded ({'; '.join(sorted(reasons))}); it may be damaged or of "
            "another model: load another iteration with --ckpt-step"
        ) from error


class _GlobalShapeLoadPlanner(DefaultLoadPlanner):
    """Compares sizes in the whole model: a DTensor of ours may be tensor parallel or hold padding rows."""

    def create_local_plan(self) -> LoadPlan:
        """One read per box that this rank holds."""
        assert self.metadata is not None
        items = []
        for name, value in self.state_dict.items():
            entry = self.metadata.state_dict_metadata.get(name)
            if entry is None:
                raise ValueError(f"{name} is missing")
            if isinstance(entry, TensorStorageMetadata) and isinstance(value, torch.Tensor):
                info = getattr(value, "shard_info", None)
                shape = value.shape if info is None else info.location.global_shape
                if tuple(entry.size) != tuple(shape):
                    raise ValueError(f"{name} has shape {tuple(entry.size)} there, {tuple(shape)} here")
            items += _create_read_items(name, entry, value)
        return LoadPlan(items)


def _write_tensors(partial: Path, tensors: Mapping[str, Any]) -> None:
    dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(partial))


def _make_empty(directory: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True)


def _finalise(partial: Path, target: Path, record: RunRecord) -> None:
    """Turn a fully written partial directory into the checkpoint that the marker names."""
    _write_durably(partial / RUN_FILE, json.dumps(asdict(record), indent=1, default=str))
    old = target.with_name(target.name + ".old")
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    partial.rename(target)
    _sync_directory(target.parent)
    shutil.rmtree(old, ignore_errors=True)
    _write_durably(target.parent / MARKER, f"{record.progress.iteration}")


def _write_durably(path: Path, text: str) -> None:
    """Replace `path` in one go: after a crash it is the old file or the new one."""
    temporary = path.with_name(path.name + ".partial")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _delete_old(root: Path, newest: int, interval: int) -> None:
    """Delete what retention does not keep. The newest good one is `newest`; later leftovers are not ours to
    judge.
    """
    for directory in root.glob("iter_*"):
        number = directory.name.removeprefix("iter_")
        if number.isdigit() and int(number) < newest and int(number) % interval:
            shutil.rmtree(directory, ignore_errors=True)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _on_rank_zero(action: Callable[[], None], root: Path, target: Path, partial: Path | None = None) -> None:
    _all_ranks(action if _rank() == 0 else lambda: None, root, target, partial)


def _all_ranks(action: Callable[[], None], root: Path, target: Path, partial: Path | None = None) -> None:
    """Run `action` on every rank; if it fails on any, clean up and raise the same RunStopped on all."""
    failure: str | None = None
    try:
        action()
    except CheckpointException as error:
        failure = "; ".join(sorted({_reason(cause) for cause, _ in error.failures.values()}))
    except OSError as error:
        failure = _reason(error)
    failures = [failure]
    if dist.is_initialized() and dist.get_world_size() > 1:
        failures = [None] * dist.get_world_size()
        dist.all_gather_object(failures, failure)
    first = next(((rank, reason) for rank, reason in enumerate(failures) if reason), None)
    if first is None:
        return
    if partial is not None and _rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
    rank, reason = first
    raise RunStopped(
        f"--save {root}: the checkpoint {target.name} could not be written (rank {rank}: {reason}). "
        f"{_what_is_left(root)}"
    )


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return "the disk is full"
    return error.strerror or str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def _what_is_left(root: Path) -> str:
    latest = None
    with contextlib.suppress(ValueError):
        latest = latest_iteration(root, "--save")
    if latest is None:
        return "Make room or give another --save"
    return (
        f"The checkpoint of iteration {latest} is still good: make room, or give another --save and --load it"
    )
