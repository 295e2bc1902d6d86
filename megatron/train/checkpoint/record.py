"""The readable half of a checkpoint: how far the run came, of which model it is, with which arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron.train.checkpoint.files import MARKER, RUN_FILE, existing_directory

FORMAT = 1

# Fields of the model's configuration that may differ between a checkpoint and the run that loads it: they
# do not change what the weights mean.
FREE_MODEL_FIELDS = frozenset(
    {
        "attention_dropout",
        "hidden_dropout",
        "recompute",
        "offload",
        "cp_comm_type",
        "hierarchical_context_parallel_sizes",
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
    arguments: of the run that saved, for information and --use-checkpoint-args. layout: ranks on each axis;
    random states belong to a rank's place in it.
    """

    progress: Progress
    model: Mapping[str, Any]
    data: Mapping[str, Any]
    schedule: Mapping[str, Any]
    scaler: Mapping[str, Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    world_size: int = 1
    layout: Mapping[str, int] = field(default_factory=dict)
    has_optimizer: bool = True
    has_rng: bool = True
    torch_version: str = torch.__version__
    format: int = FORMAT


def read_record(root: str | Path, iteration: int, flag: str = "--load") -> RunRecord:
    """The readable half of a checkpoint of `root`; see `read_record_of`."""
    return read_record_of(existing_directory(root, iteration), flag)


def read_record_of(directory: Path, flag: str = "--load") -> RunRecord:
    """The readable half of the checkpoint in `directory`.

    Raises ValueError naming the file: it is missing, damaged or of another format.
    """
    path = directory / RUN_FILE
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
            f"{flag}: {path} is missing, so there is no checkpoint there; give the directory that holds {MARKER}, "
            "or another --ckpt-step"
        ) from None
    except OSError as error:
        raise ValueError(f"{flag}: {path} cannot be read ({error.strerror}); check its permissions") from None
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
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
