"""Checkpoints of megatron-core and Megatron-FSDP, read a layer at a time: which of their tensors is which of ours.

Both are folders of torch.distributed.checkpoint.

- `torch_dist`: `common.pt` holds arguments, iteration, schedule and optimizer groups. Layers that are alike are one
  tensor [layers, ...] without a number in its name, experts [layers, experts, ...]; gated weights are [gate; up].
  Optimizer state has the weights' names after `optimizer.state.{kind}.`.
- `fsdp_dtensor`: everything is in `.metadata`. Names are a model's, below `model.module.`, with global experts; gated
  weights are two tensors, `..._w` and `..._v`. Optimizer state is `optimizer.state.{name}.{kind}`.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron.tools.convert import foreign

COMMON_FILE = "common.pt"
WEIGHT = ""  # the kind of a weight itself, beside the kinds of optimizer state
MAIN_WEIGHTS = ("fp32_param", "master_param", "param")
_MODULE = re.compile(r"^(?:model\d*\.)?(?:module\.)*")
_STATE = re.compile(r"^(?:chained_\d+\.)?optimizer\.state\.")
_KIND = re.compile(r"(?:exp_avg|exp_avg_sq|momentum_buffer|step|fp32_param|master_param|param)")
_LAYER = re.compile(r"^(decoder\.layers|mtp\.layers)\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$")

# A norm alone or fused with the layer after it, by the layers that the model was built of; the name of a fused one is
# also given to the norm before experts.
_FUSED = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)
_NORMS = (*_FUSED, *((alone, fused) for fused, alone in _FUSED))


@dataclass(frozen=True)
class Piece:
    """A tensor of theirs, or the part of it that `index` picks on its first dims. shape: of the piece."""

    key: str
    index: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class CoreCheckpoint:
    """directory: with `.metadata`. common: everything that is no tensor. names: {kind: {plain name: key}}."""

    directory: Path
    common: Mapping[str, Any]
    tensors: Mapping[str, TensorStorageMetadata]
    names: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def kinds(self) -> list[str]:
        """Kinds of optimizer state of the parameter's shape that are there."""
        return sorted(kind for kind in self.names if kind not in (WEIGHT, "step", *MAIN_WEIGHTS))

    def find(self, name: str, kind: str = WEIGHT) -> list[Piece]:
        """What the tensor of ours with this name is made of, one below the other; empty where it is not there."""
        there = self.names.get(kind, {})
        for candidate, index in _candidates(name):
            found = [there[key] for key in (candidate, f"{candidate}_w", f"{candidate}_v") if key in there]
            if found:
                return [self._piece(key, index) for key in found]
        return []

    def read(self, pieces: list[Piece]) -> Tensor:
        """The tensor that `find` described."""
        parts = [self._read(piece) for piece in pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _piece(self, key: str, index: tuple[int, ...]) -> Piece:
        entry = self.tensors[key]
        return Piece(key, index, tuple(entry.size[len(index) :]), entry.properties.dtype)

    def _read(self, piece: Piece) -> Tensor:
        entry = self.tensors[piece.key]
        zeros = (0,) * len(piece.shape)
        offsets, sizes = (
            torch.Size((*piece.index, *zeros)),
            torch.Size((*(1 for _ in piece.index), *piece.shape)),
        )
        out = torch.empty(sizes, dtype=piece.dtype)
        planner = _BoxPlanner(out, entry, ChunkStorageMetadata(offsets, sizes))
        try:
            dcp.load(
                {piece.key: out},
                storage_reader=foreign.Reader(self.directory),
                planner=planner,
                no_dist=True,
            )
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"--load: {self.directory}: {piece.key} cannot be read ({reason})") from error
        return out.view(piece.shape)


class _BoxPlanner(DefaultLoadPlanner):
    """Reads one box of one tensor."""

    def __init__(self, out: Tensor, entry: TensorStorageMetadata, box: ChunkStorageMetadata) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._out, self._entry, self._box = out, entry, box

    def create_local_plan(self) -> LoadPlan:
        """What the box needs."""
        (key,) = self.state_dict
        return LoadPlan(create_read_items_for_chunk_list(key, self._entry, [self._box]))

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The box; `index` has its place in the whole."""
        return self._out


def _candidates(name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names that a tensor of ours may have in theirs, with the part of it that is ours."""
    forms: list[tuple[str, tuple[int, ...]]] = [(name, ())]
    expert = _EXPERT.search(name)
    if expert is not None:
        stem, number = name[: expert.start()], int(expert[3])
        forms.append((f"{stem}.experts.experts.{number}.{expert[1]}.{expert[2]}", ()))
        forms.append((f"{stem}.experts.local_experts.{number}.{expert[1]}.{expert[2]}", ()))
        forms.append((f"{stem}.experts.experts.{expert[1]}.{expert[2]}", (number,)))
    forms += [(name.replace(*pair), ()) for pair in _NORMS if pair[0] in name]
    for form, index in forms:
        yield form, index
        layer = _LAYER.match(form)
        if layer is not None:
            yield f"{layer[1]}.{form[layer.end() :]}", (int(layer[2]), *index)


def open_checkpoint(directory: Path, with_optimizer: bool = True) -> CoreCheckpoint:
    """Read what describes a checkpoint.

    with_optimizer: its state will be read. Raises ValueError naming file and cause if the folder is not one of theirs,
    or if that state cannot be read.
    """
    try:
        entries = foreign.Reader(directory).read_metadata().state_dict_metadata
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ImportError) as error:
        raise ValueError(
            f"--load: {directory / '.metadata'} is missing or damaged ({type(error).__name__}); give the folder of "
            "an iteration of a torch_dist or fsdp_dtensor checkpoint"
        ) from None
    tensors = {key: entry for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    common = _common(directory, [key for key in entries if key not in tensors])
    bucketed = [key for key in tensors if ".distributed." in key or "param_state" in key]
    if bucketed and with_optimizer:
        raise ValueError(
            f"--load: {directory}: its optimizer state is stored by buckets of one layout; save it once more with "
            "--dist-ckpt-optim-fully-reshardable, or take the weights alone with --no-load-optim"
        )
    names: dict[str, dict[str, str]] = {}
    for key in tensors.keys() - bucketed:
        kind, name = _kind_and_name(key)
        names.setdefault(kind, {})[name] = key
    return CoreCheckpoint(directory, common, tensors, names)


def _kind_and_name(key: str) -> tuple[str, str]:
    """("exp_avg", "decoder...") of a key of either format; ("", name) of a weight."""
    found = _STATE.match(key)
    if found is None:
        return WEIGHT, _MODULE.sub("", key)
    rest = key[found.end() :]
    first, _, name = rest.partition(".")
    if _KIND.fullmatch(first):
        return first, _MODULE.sub("", name)
    name, _, kind = rest.rpartition(".")
    return kind, _MODULE.sub("", name)


def _common(directory: Path, objects: list[str]) -> dict[str, Any]:
    """Everything that is no tensor: common.pt, or the objects of the checkpoint itself, by their keys."""
    path = directory / COMMON_FILE
    try:
        if path.is_file():
            return dict(foreign.load(str(path)))
        wanted = [
            key
            for key in objects
            if key.startswith(("args", "iteration", "opt_param_scheduler", "optimizer."))
        ]
        values: dict[str, Any] = {key: io.BytesIO() for key in wanted}
        planner = foreign.ObjectPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        dcp.load(values, storage_reader=foreign.Reader(directory), planner=planner, no_dist=True)
    except Exception as error:
        raise ValueError(f"--load: {path} cannot be read ({type(error).__name__}: {error})") from error
    return _nested(values)


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{"a.b": 1} -> {"a": {"b": 1}} for the schedule; other keys stay."""
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        head, _, rest = key.partition(".")
        if head == "opt_param_scheduler" and rest:
            nested.setdefault(head, {})[rest] = value
        else:
            nested[key] = value
    return nested
