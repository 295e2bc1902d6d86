"""A checkpoint of megatron-core (torch_dist) or Megatron-FSDP (fsdp_dtensor) -> ours, to go on with the training.

Weights (the optimizer's fp32 ones, where there are), state of Adam, step, learning-rate schedule, data position and
the arguments of the model. Random states belong to their ranks and are left.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.tools.convert.core_checkpoint import (
    MAIN_WEIGHTS,
    WEIGHT,
    CoreCheckpoint,
    Piece,
    open_checkpoint,
)
from megatron.tools.convert.deferred import DeferredTensor
from megatron.tools.convert.foreign import is_foreign
from megatron.tools.convert.parts import save_in_parts
from megatron.tools.convert.records import checkpoint_shapes, record_of
from megatron.tools.convert.safetensors_file import first_few
from megatron.tools.convert.target import new_folder, refuse_existing
from megatron.train.arguments import parse_args, validate
from megatron.train.arguments.model import model_config_from
from megatron.train.arguments.saved import model_destinations
from megatron.train.checkpoint import MARKER, Progress, directory_of, latest_iteration
from megatron.train.config import TrainConfig

RELEASE = (
    "release"  # what the marker holds instead of an iteration, and the folder's name, of a converted model
)
# Their name -> ours, of the schedule's configuration.
_SCHEDULE = {
    "max_lr": "max_lr",
    "min_lr": "min_lr",
    "init_lr": "init_lr",
    "lr_warmup_steps": "warmup_samples",
    "lr_decay_steps": "decay_samples",
    "lr_decay_style": "decay_style",
    "wsd_decay_steps": "wsd_decay_samples",
    "lr_wsd_decay_style": "wsd_decay_style",
    "start_wd": "start_weight_decay",
    "end_wd": "end_weight_decay",
    "wd_incr_steps": "weight_decay_samples",
    "wd_incr_style": "weight_decay_style",
}


@dataclass(frozen=True)
class _Source:
    """A checkpoint of theirs with the configuration that its arguments mean."""

    checkpoint: CoreCheckpoint
    config: TrainConfig
    arguments: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class ImportOptions:
    """vocab_size: the tokenizer's, where the checkpoint's arguments do not say it (None: all rows of the embedding are
    words). iteration: of the checkpoint (None: the marker's). optimizer: take its state, if there is any.
    """

    vocab_size: int | None = None
    iteration: int | None = None
    optimizer: bool = True


def import_core(load: Path, target: Path, options: ImportOptions) -> list[str]:
    """Convert a checkpoint of megatron-core to one of ours, `target`, which must not exist.

    load: the folder of an iteration, or the one with the marker.

    Returns lines that say what was done. Raises ValueError with one line; nothing is left then.
    """
    refuse_existing(target)
    source = _open(load, options)
    tensors = _weights(source)
    step = _step(source.checkpoint) if options.optimizer else None
    if options.optimizer and source.checkpoint.kinds and step is None:
        raise ValueError(
            f"--load: {source.checkpoint.directory} holds {', '.join(source.checkpoint.kinds)} but no step of the "
            "optimizer, without which training would not go on as it was; save it once more with Megatron-LM, or take "
            "the weights alone with --no-load-optim"
        )
    with_optimizer = step is not None and bool(source.checkpoint.kinds)
    if with_optimizer:
        assert step is not None
        tensors |= _optimizer(source, step)
    record = record_of(source.config, **_position(source), has_optimizer=with_optimizer)
    with new_folder(target) as partial:
        save_in_parts(partial, tensors, record)
    what = (
        f"with {', '.join(source.checkpoint.kinds)} at step {step}"
        if with_optimizer
        else "without optimizer state"
    )
    return [
        f"iteration {record.progress.iteration}, {record.progress.consumed_train_samples} samples, {len(tensors)} "
        f"tensors {what} -> {target}"
    ]


def _open(load: Path, options: ImportOptions) -> _Source:
    checkpoint = open_checkpoint(_directory(load, options.iteration), options.optimizer)
    arguments = checkpoint.common.get("args")
    if arguments is None:
        raise ValueError(
            f"--load: {checkpoint.directory} holds no arguments (args): they say which model it is"
        )
    values = dict(arguments) if isinstance(arguments, Mapping) else dict(vars(arguments))
    values = {name: value for name, value in values.items() if not is_foreign(value)}
    config = _config(checkpoint, values, options.vocab_size)
    return _Source(checkpoint, config, values, checkpoint_shapes(model_config_from(config)))


def _directory(load: Path, iteration: int | None) -> Path:
    """Of the tensors: `load` itself, or the iteration that was asked for or that the marker names."""
    if iteration is not None:
        directory = directory_of(load, iteration)
        if not directory.is_dir():
            raise ValueError(f"--ckpt-step {iteration}: {load} holds no {directory.name}")
        return directory
    if (load / ".metadata").is_file():
        return load
    if (load / MARKER).is_file() and (load / MARKER).read_text(encoding="utf-8").strip() == RELEASE:
        return load / RELEASE
    latest = latest_iteration(load)
    return load if latest is None else directory_of(load, latest)


def _config(checkpoint: CoreCheckpoint, values: Mapping[str, Any], vocab_size: int | None) -> TrainConfig:
    """Our arguments with what theirs say of the model and its precision."""
    words = ["--micro-batch-size", "1", "--mock-data", "--skip-train", "--seq-length"]
    namespace = parse_args([*words, str(values.get("seq_length") or 1)])
    tokenizer = {"tokenizer_type", "tokenizer_model", "vocab_file", "merge_file"}
    for dest in {*model_destinations(), "bf16", "fp16", "attention_dropout", "hidden_dropout"} - tokenizer:
        if values.get(dest) is not None:
            setattr(namespace, dest, values[dest])
    if not values.get("group_query_attention"):
        namespace.num_query_groups = 1
    namespace.tokenizer_type = "NullTokenizer"
    rows = checkpoint.find("embedding.word_embeddings.weight")
    if not rows:
        raise ValueError(
            f"--load: {checkpoint.directory} has no embedding.word_embeddings.weight: not a GPT model"
        )
    namespace.vocab_size = vocab_size or values.get("vocab_size") or rows[0].shape[0]
    if namespace.vocab_size > rows[0].shape[0]:
        raise ValueError(
            f"--vocab-size {namespace.vocab_size} is more than the embedding's {rows[0].shape[0]} rows"
        )
    namespace.padded_vocab_size = None
    return validate(namespace, 1, "cpu").replace(tokenizer_type=None)


def _weights(source: _Source) -> dict[str, Tensor]:
    """{our key: tensor} of the model; the optimizer's own copy of a weight where it has one."""
    found: dict[str, Tensor] = {}
    missing = []
    for key, shape in source.shapes.items():
        name = key.partition(".")[2]
        choices = (source.checkpoint.find(name, kind) for kind in (*MAIN_WEIGHTS, WEIGHT))
        pieces: list[Piece] = next((pieces for pieces in choices if pieces), [])
        if pieces:
            found[key] = _deferred(source, name, pieces, shape)
        else:
            missing.append(name)
    if missing:
        raise ValueError(
            f"--load: {source.checkpoint.directory} lacks {first_few(missing)}: a model of its arguments has them"
        )
    return found


def _deferred(source: _Source, name: str, pieces: list[Piece], shape: tuple[int, ...]) -> Tensor:
    there = (sum(piece.shape[0] for piece in pieces), *pieces[0].shape[1:]) if shape else ()
    vocabulary = name in ("embedding.word_embeddings.weight", "output_layer.weight")
    padded = vocabulary and there[1:] == shape[1:] and there[0] >= shape[0]
    if there != shape and not padded:
        raise ValueError(
            f"--load: {source.checkpoint.directory}: {pieces[0].key} has shape {list(there)}, but its arguments mean "
            f"{list(shape)}"
        )
    return DeferredTensor(shape, pieces[0].dtype, _reader(source.checkpoint, pieces, shape))


def _reader(checkpoint: CoreCheckpoint, pieces: list[Piece], shape: tuple[int, ...]) -> Callable[[], Tensor]:
    return lambda: checkpoint.read(pieces)[: shape[0]].clone() if shape else checkpoint.read(pieces)


def _optimizer(source: _Source, step: int) -> dict[str, Tensor]:
    """{"optimizer." + name + "." + kind: tensor}, with the step of every parameter."""
    found: dict[str, Tensor] = {}
    for key, shape in source.shapes.items():
        prefix, _, name = key.partition(".")
        if prefix != "model":
            continue
        for kind in source.checkpoint.kinds:
            pieces = source.checkpoint.find(name, kind)
            if not pieces:
                raise ValueError(
                    f"--load: {source.checkpoint.directory} has {kind} for other parameters but not for {name}"
                )
            found[f"optimizer.{name}.{kind}"] = _deferred(source, name, pieces, shape)
        found[f"optimizer.{name}.step"] = torch.tensor(float(step))
    return found


def _step(checkpoint: CoreCheckpoint) -> int | None:
    """Steps that the optimizer took: of its state, or of its groups; None where neither is there."""
    return _find_step(checkpoint.common.get("optimizer")) or _find_step(
        {key: value for key, value in checkpoint.common.items() if re.search(r"^optimizer\..*\.step$", key)}
    )


def _find_step(value: Any) -> int | None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            named = str(key).rpartition(".")[2] in ("step", "common_step")
            found = int(item) if named and isinstance(item, int | float | Tensor) else _find_step(item)
            if found is not None:
                return found
    if isinstance(value, list | tuple):
        return next((found for found in map(_find_step, value) if found is not None), None)
    return None


def _position(source: _Source) -> dict[str, Any]:
    """Progress, data and schedule for RunRecord."""
    common, values = source.checkpoint.common, source.arguments
    samples = int(values.get("consumed_train_samples") or 0)
    progress = Progress(
        iteration=int(common.get("iteration") or 0),
        consumed_train_samples=samples,
        consumed_valid_samples=int(values.get("consumed_valid_samples") or 0),
    )
    theirs = common.get("opt_param_scheduler") or {}
    schedule: dict[str, Any] = {}
    if theirs:
        config = {ours: theirs[name] for name, ours in _SCHEDULE.items() if name in theirs}
        schedule = {"num_samples": theirs["num_steps"], "config": config}
    return {"progress": progress, "schedule": schedule, "data": {"train": {"consumed_samples": samples}}}
