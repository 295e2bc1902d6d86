"""A folder of Hugging Face safetensors -> a checkpoint of ours, one tensor in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron.models.config import ModelConfig
from megatron.tools.convert.deferred import DeferredTensor
from megatron.tools.convert.families import Family, family_of
from megatron.tools.convert.mapping import Rule, WeightMap
from megatron.tools.convert.parts import save_in_parts
from megatron.tools.convert.read_config import HuggingFaceConfig
from megatron.tools.convert.records import (
    checkpoint_key,
    checkpoint_shapes,
    model_from_flags,
    record_of,
    train_config,
)
from megatron.tools.convert.safetensors_file import TensorInfo, first_few, read_folder, read_tensor
from megatron.tools.convert.target import new_folder, refuse_existing

CONFIG_FILE, TOKENIZER_FILE = "config.json", "tokenizer.json"


@dataclass(frozen=True)
class HuggingFaceModel:
    """A folder that has been read but for its values: what fits and what is missing is known."""

    folder: Path
    config: HuggingFaceConfig
    family: Family
    tensors: Mapping[str, TensorInfo]
    model: ModelConfig

    @property
    def weights(self) -> WeightMap:
        """Which tensor is which of ours."""
        return self.family.weights(self.model)

    def deferred(self) -> dict[str, Tensor]:
        """{key in our checkpoint: tensor that is read when it is used}."""
        shapes = checkpoint_shapes(self.model)
        found: dict[str, Tensor] = {}
        for rule in self.weights.rules:
            key = checkpoint_key(rule.ours)
            dtype = self.tensors[rule.theirs[0]].dtype
            found[key] = DeferredTensor(shapes[key], dtype, self._reader(rule))
        assert found.keys() == shapes.keys(), (
            f"rules and model differ in {sorted(found.keys() ^ shapes.keys())[:3]}"
        )
        return found

    def _reader(self, rule: Rule) -> Callable[[], Tensor]:
        return lambda: rule.form.join([read_tensor(self.tensors[name]) for name in rule.theirs])


def read_model(folder: Path) -> HuggingFaceModel:
    """Read config.json and the headers of a model's files, and check that each tensor is there and fits.

    Raises ValueError with one line that names file and cause.
    """
    if not folder.is_dir():
        raise ValueError(
            f"--load {folder} is no folder: give the one with {CONFIG_FILE} and the safetensors files"
        )
    config = read_config(folder / CONFIG_FILE)
    family = family_of(config)
    tensors = read_folder(folder)
    layers = config.get("num_hidden_layers", 0)
    depths = config.get("num_nextn_predict_layers", 0)
    there = [depth for depth in range(depths) if f"model.layers.{layers + depth}.eh_proj.weight" in tensors]
    config = HuggingFaceConfig(config.path, config.values, len(there))
    try:
        model = model_from_flags(family.flags(config))
    except (TypeError, KeyError) as error:
        raise ValueError(f"{config.path} is damaged ({type(error).__name__}: {error})") from None
    found = HuggingFaceModel(folder, config, family, tensors, model)
    _check_tensors(found)
    return found


def read_config(path: Path) -> HuggingFaceConfig:
    """A config.json. Raises ValueError naming the file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: give the folder of a Hugging Face model") from None
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read ({type(error).__name__}: {error})") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} is no config.json: it holds no object")
    return HuggingFaceConfig(path, values)


def _check_tensors(source: HuggingFaceModel) -> None:
    weights, tensors = source.weights, source.tensors
    wanted = {name for rule in weights.rules for name in rule.theirs}
    missing = wanted - tensors.keys()
    if missing:
        raise ValueError(
            f"{source.folder}: {first_few(missing)} missing, which a {source.family.model_type} model of "
            f"{CONFIG_FILE}'s sizes has; fetch all its files"
        )
    copies = {copy.name for copy in weights.copies}
    unknown = {name for name in tensors.keys() - wanted - copies if not weights.ignored(name)}
    if unknown:
        raise ValueError(
            f"{tensors[min(unknown)].file}: {first_few(unknown)} unknown in a {source.family.model_type} model of "
            f"{CONFIG_FILE}'s sizes: nothing of ours could hold it"
        )
    shapes = checkpoint_shapes(source.model)
    for rule in weights.rules:
        _check_shapes(source, rule, shapes[checkpoint_key(rule.ours)])


def _check_shapes(source: HuggingFaceModel, rule: Rule, ours: tuple[int, ...]) -> None:
    parts = rule.form.split(torch.empty(ours, device="meta"))
    infos = [source.tensors[name] for name in rule.theirs]
    for name, info, part in zip(rule.theirs, infos, parts, strict=True):
        if info.shape != tuple(part.shape):
            raise ValueError(
                f"{info.file}: {name} has shape {list(info.shape)}, but {CONFIG_FILE} means {list(part.shape)}"
            )
        if info.dtype != infos[0].dtype or not info.dtype.is_floating_point or info.dtype.itemsize < 2:
            raise ValueError(
                f"{info.file}: {name} is {info.dtype}: only fp64, fp32, bf16 and fp16 can be converted, the same "
                f"for all of {first_few(rule.theirs)}"
            )


def _check_copies(source: HuggingFaceModel) -> None:
    """Our models have one tensor where theirs may have several: they must be equal."""
    for copy in source.weights.copies:
        if copy.name not in source.tensors:
            continue
        first, second = source.tensors[copy.name], source.tensors[copy.of]
        if first.shape != second.shape or not torch.equal(read_tensor(first), read_tensor(second)):
            raise ValueError(
                f"{first.file}: {copy.name} is not the same as {copy.of}, but our model shares one tensor for both"
            )


def import_hugging_face(folder: Path, target: Path) -> list[str]:
    """Convert the model in `folder` to a checkpoint of ours, `target`, which must not exist; bits do not change.

    Returns lines that say what was done. Raises ValueError with one line; nothing is left then.
    """
    refuse_existing(target)
    source = read_model(folder)
    _check_copies(source)
    tensors = source.deferred()
    tokenizer = folder.resolve() if (folder / TOKENIZER_FILE).is_file() else None
    dtype = source.tensors[source.weights.rules[0].theirs[0]].dtype
    record = record_of(train_config(source.family.flags(source.config), dtype, tokenizer))
    with new_folder(target) as partial:
        save_in_parts(partial, tensors, record)
    total = sum(tensor.numel() for tensor in tensors.values())
    lines = [
        f"{source.family.model_type}: {len(tensors)} tensors, {total / 1e6:.2f} M parameters -> {target}"
    ]
    depths = source.config.get("num_nextn_predict_layers", 0)
    if depths > source.config.predictions:
        lines.append(
            f"{CONFIG_FILE} says {depths} prediction layers, the files hold {source.config.predictions}: the model "
            "has as many as the files"
        )
    if source.model.mla is not None and source.model.layernorm_epsilon != 1e-6:
        lines.append(
            f"the norms of the latents use rms_norm_eps {source.model.layernorm_epsilon} here; transformers has 1e-6"
        )
    return lines
