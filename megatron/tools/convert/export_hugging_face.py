"""A checkpoint of ours -> a folder of Hugging Face safetensors, about one layer in memory at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from megatron.models.config import ModelConfig
from megatron.tools.convert.families import Family, family_for
from megatron.tools.convert.import_hugging_face import CONFIG_FILE, HuggingFaceModel, read_model
from megatron.tools.convert.mapping import Rule, WeightMap
from megatron.tools.convert.parts import in_parts
from megatron.tools.convert.read_config import HuggingFaceConfig
from megatron.tools.convert.records import (
    checkpoint_key,
    checkpoint_shapes,
    differences,
    model_from_flags,
    model_of,
)
from megatron.tools.convert.safetensors_file import (
    INDEX_FILE,
    Described,
    FolderWriter,
    first_few,
    index_json,
    plan_files,
    read_index,
)
from megatron.tools.convert.target import new_folder, refuse_existing
from megatron.train.checkpoint import directory_of, load_tensors, read_record, read_shapes

# Beside weights and config.json: what `like` gives along.
_COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


@dataclass(frozen=True)
class ExportOptions:
    """like: a folder of the same model, whose config.json, tokenizer, dtypes and division into files are taken over.
    dtype: of the weights; None: as in the checkpoint, or `like`. max_file_bytes: of a safetensors file.
    """

    like: Path | None = None
    dtype: torch.dtype | None = None
    max_file_bytes: int = 5_000_000_000


@dataclass(frozen=True)
class _Plan:
    """What will be written: weights, {name: shape and dtype} and {name: file}."""

    model: ModelConfig
    family: Family
    weights: WeightMap
    tensors: Mapping[str, Described]
    files: Mapping[str, str]
    template: HuggingFaceModel | None = None
    stored: Mapping[str, torch.dtype] = field(default_factory=dict)


def export_hugging_face(load: Path, iteration: int, target: Path, options: ExportOptions) -> list[str]:
    """Convert the checkpoint of `iteration` in `load` to `target`, which must not exist.

    Returns lines that say what was done. Raises ValueError with one line; nothing is left then.
    """
    refuse_existing(target)
    plan = _plan(load, iteration, options)
    with new_folder(target) as partial:
        writer = FolderWriter(partial, plan.tensors, plan.files)
        sizes = {
            rule.ours: sum(plan.tensors[name].num_bytes for name in rule.theirs)
            for rule in plan.weights.rules
        }
        for rules in in_parts(plan.weights.rules, lambda rule: rule.ours, lambda rule: sizes[rule.ours]):
            _write(load, iteration, rules, plan, writer)
        writer.close()
        _write_rest(partial, plan)
    files = len(set(plan.files.values()))
    total = sum(item.num_bytes for item in plan.tensors.values())
    return [
        f"{plan.family.model_type}: {len(plan.tensors)} tensors, {total} bytes in {files} file(s) -> {target}"
    ]


def _plan(load: Path, iteration: int, options: ExportOptions) -> _Plan:
    model = model_of(read_record(load, iteration).model)
    family = family_for(model)
    _check_family(load, model, family)
    stored = read_shapes(load, iteration)
    shapes = checkpoint_shapes(model)
    missing = shapes.keys() - stored.keys()
    if missing:
        raise ValueError(f"--load: {directory_of(load, iteration)} lacks {first_few(missing)}: it is damaged")
    for key, shape in shapes.items():
        if tuple(stored[key][0]) != shape:
            raise ValueError(
                f"--load: {directory_of(load, iteration)}: {key} has shape {list(stored[key][0])}, but its model "
                f"means {list(shape)}"
            )
    template = None if options.like is None else _template(options.like, model, family)
    weights = family.weights(model)
    dtypes = {key: dtype for key, (_, dtype) in stored.items()}
    tensors = _described(weights, shapes, dtypes, options, template)
    files = plan_files(tensors, options.max_file_bytes)
    if template is not None:
        files = {name: template.tensors[name].file.name for name in tensors}
    return _Plan(model, family, weights, tensors, files, template, dtypes)


def _check_family(load: Path, model: ModelConfig, family: Family) -> None:
    """Raise ValueError, naming what differs, unless the config.json that we would write means this model."""
    values = {"model_type": family.model_type, **family.config(model)}
    predictions = model.mtp.num_layers if model.mtp else 0
    back = model_from_flags(family.flags(HuggingFaceConfig(load / CONFIG_FILE, values, predictions)))
    different = differences(model, back)
    if different:
        raise ValueError(
            f"--load {load}: the model is no {family.model_type} (nor another family that is known): of ours and "
            f"theirs, {'; '.join(different)}"
        )


def _template(folder: Path, model: ModelConfig, family: Family) -> HuggingFaceModel:
    template = read_model(folder)
    different = differences(model, template.model)
    if different or template.family is not family:
        raise ValueError(f"--like {folder} is another model: of ours and its, {'; '.join(different)}")
    return template


def _described(
    weights: WeightMap,
    shapes: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, torch.dtype],
    options: ExportOptions,
    template: HuggingFaceModel | None,
) -> dict[str, Described]:
    """Shape and dtype of each tensor of theirs, in the order of the model."""
    found: dict[str, Described] = {}
    for rule in weights.rules:
        key = checkpoint_key(rule.ours)
        dtype = options.dtype or stored[key]
        if rule.ours.endswith(".expert_bias"):
            dtype = stored[key]  # steps of 1e-3 that bf16 would lose
        for name, part in zip(
            rule.theirs, rule.form.split(torch.empty(shapes[key], device="meta")), strict=True
        ):
            if template is not None and options.dtype is None:
                dtype = template.tensors[name].dtype
            found[name] = Described(tuple(part.shape), dtype)
    for copy in weights.copies:
        if copy.name in template.tensors if template is not None else copy.always:
            found[copy.name] = found[copy.of]
    return found


def _write(load: Path, iteration: int, rules: Sequence[Rule], plan: _Plan, writer: FolderWriter) -> None:
    shapes = {rule.ours: rule.form.join(_meta_parts(rule, plan)).shape for rule in rules}
    keys = {rule.ours: checkpoint_key(rule.ours) for rule in rules}
    tensors: dict[str, Tensor] = {
        keys[rule.ours]: torch.empty(shapes[rule.ours], dtype=plan.stored[keys[rule.ours]]) for rule in rules
    }
    load_tensors(load, iteration, tensors)
    copies: dict[str, list[str]] = {}
    for copy in plan.weights.copies:
        if copy.name in plan.tensors:
            copies.setdefault(copy.of, []).append(copy.name)
    for rule in rules:
        for name, part in zip(rule.theirs, rule.form.split(tensors.pop(keys[rule.ours])), strict=True):
            values = part.to(plan.tensors[name].dtype)
            for each in (name, *copies.get(name, ())):
                writer.write(each, values)


def _meta_parts(rule: Rule, plan: _Plan) -> list[Tensor]:
    return [torch.empty(plan.tensors[name].shape, device="meta") for name in rule.theirs]


def _write_rest(folder: Path, plan: _Plan) -> None:
    """config.json, the index where there are several files, and what comes along."""
    if plan.template is not None:
        source = plan.template.folder
        for name in (CONFIG_FILE, INDEX_FILE, *_COMPANIONS):
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        if (source / INDEX_FILE).is_file() and read_index(source / INDEX_FILE) != dict(plan.files):
            (folder / INDEX_FILE).write_text(index_json(plan.tensors, plan.files), encoding="utf-8")
        return
    first = plan.tensors[plan.weights.rules[0].theirs[0]]
    values = {
        "architectures": [plan.family.architecture],
        "model_type": plan.family.model_type,
        "torch_dtype": str(first.dtype).removeprefix("torch."),
        **plan.family.config(plan.model),
    }
    (folder / CONFIG_FILE).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if len(set(plan.files.values())) > 1:
        (folder / INDEX_FILE).write_text(index_json(plan.tensors, plan.files), encoding="utf-8")
