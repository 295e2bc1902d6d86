"""What a converted checkpoint says of its model: flags -> configuration -> record, and back."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.models.backends.base import LayerOptions
from megatron.models.backends.torch import TorchBackend
from megatron.models.config import ModelConfig
from megatron.models.gpt import GPTModel
from megatron.parallel.annotate import annotation_of, global_shape
from megatron.parallel.mesh import ParallelMesh
from megatron.tools.convert.read_config import Flags
from megatron.train.arguments import parse_args, validate
from megatron.train.arguments.model import model_config_from
from megatron.train.checkpoint import FREE_MODEL_FIELDS, Progress, RunRecord
from megatron.train.config import TrainConfig

MODEL_PREFIX, BUFFER_PREFIX = "model.", "buffer."
_LONGEST_SEQUENCE = 4096
_PRECISION = {torch.bfloat16: ["--bf16"], torch.float16: ["--fp16"]}


def train_config(flags: Flags, dtype: torch.dtype, tokenizer: Path | None = None) -> TrainConfig:
    """The arguments of a run with this model, one rank and mock data, for `--use-checkpoint-args` and for tools.

    dtype: of the weights. tokenizer: a tokenizer.json's folder. Raises ValueError naming the flag that does not fit.
    """
    words = [word for flag, value in flags.items() for word in _words(flag, value)]
    length = min(int(flags["--max-position-embeddings"]), _LONGEST_SEQUENCE)
    words += [
        "--seq-length",
        str(length),
        "--micro-batch-size",
        "1",
        "--mock-data",
        "--skip-train",
        *_PRECISION.get(dtype, []),
    ]
    if tokenizer is None:
        words += ["--tokenizer-type", "NullTokenizer"]
        # Named for the check alone: it adds a word to --vocab-size, and the run that loads this names its own.
        return validate(parse_args(words), 1, "cpu").replace(tokenizer_type=None)
    words += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer)]
    return validate(parse_args(words), 1, "cpu")


def _words(flag: str, value: bool | int | float | str) -> list[str]:
    return [flag] if value is True else [flag, str(value)]


def model_of(values: Mapping[str, Any]) -> ModelConfig:
    """The configuration that RunRecord.model holds as plain values."""
    model: ModelConfig = _made(ModelConfig, values)
    return model


def _made(kind: Any, values: Mapping[str, Any]) -> Any:
    """A dataclass from plain values; fields that are dataclasses too come from theirs, lists become tuples."""
    hints = typing.get_type_hints(kind)
    given = {}
    for name, value in values.items():
        parts = [
            part for part in (hints[name], *typing.get_args(hints[name])) if dataclasses.is_dataclass(part)
        ]
        is_part = parts and isinstance(value, Mapping)
        given[name] = _made(parts[0], value) if is_part else _frozen(value)
    return kind(**given)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list | tuple) else value


def model_from_flags(flags: Flags) -> ModelConfig:
    """The model that the flags describe."""
    return model_config_from(train_config(flags, torch.float32))


def record_of(config: TrainConfig, **changes: Any) -> RunRecord:
    """The record of a checkpoint that holds weights alone, at iteration 0, unless `changes` say more."""
    model = json.loads(json.dumps(dataclasses.asdict(model_config_from(config)), default=str))
    empty: dict[str, Any] = {
        "progress": Progress(),
        "data": {},
        "schedule": {},
        "scaler": {},
        "has_optimizer": False,
        "has_rng": False,
    }
    return RunRecord(model=model, arguments=config.as_dict(), **{**empty, **changes})


def differences(there: ModelConfig, here: ModelConfig) -> list[str]:
    """Fields in which two models differ and that change what the weights mean: "name: value there, value here"."""
    first, second = _meaning(there), _meaning(here)
    names = sorted(set(first) | set(second))
    return [
        f"{name} {first.get(name)}, {second.get(name)}"
        for name in names
        if first.get(name) != second.get(name)
    ]


def _meaning(config: ModelConfig) -> dict[str, Any]:
    parts = ("moe", "mla", "mtp", "rotary")
    values = dataclasses.asdict(config)
    flat = {name: value for name, value in values.items() if name not in parts}
    for part in parts:
        flat |= {f"{part}.{name}": value for name, value in (values[part] or {}).items()}
    flat["add_qkv_bias"] = config.qkv_bias  # which all biases imply
    unused = {"kv_channels"} if config.mla is not None else set()
    if config.moe is not None and all(config.moe.pattern):
        unused |= {"ffn_hidden_size"}
    return {name: value for name, value in flat.items() if name not in FREE_MODEL_FIELDS | unused}


def checkpoint_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """{key in our checkpoint: shape} of the whole model: "model." parameters without padding, "buffer." buffers."""
    mesh = ParallelMesh.single()
    model = GPTModel(config, TorchBackend(LayerOptions.from_mesh(mesh, device="meta")), mesh)
    shapes = {
        MODEL_PREFIX + name: tuple(global_shape(annotation_of(parameter), tuple(parameter.shape), 1))
        for name, parameter in model.named_parameters()
    }
    buffers = {BUFFER_PREFIX + name: tuple(buffer.shape) for name, buffer in model.named_buffers()}
    return shapes | buffers


def checkpoint_key(name: str) -> str:
    """The key of a tensor of the model."""
    return (BUFFER_PREFIX if name.endswith(".router.expert_bias") else MODEL_PREFIX) + name
