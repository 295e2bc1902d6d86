"""Between a run and its checkpoints: what goes in, what comes out, and what of it the flags ask for."""

from __future__ import annotations

import dataclasses
import json
import warnings
from typing import Any, cast

import torch
import torch.distributed as dist

from megatron.fsdp import FullyShardedDataParallel
from megatron.fsdp import checkpoint as fsdp_checkpoint
from megatron.train import rng
from megatron.train.build import Run
from megatron.train.checkpoint import (
    MARKER,
    Progress,
    RunRecord,
    check_same_model,
    latest_iteration,
    load_tensors,
    read_record,
    read_shapes,
    save_checkpoint,
)

MODEL_PREFIX, BUFFER_PREFIX, OPTIMIZER_PREFIX = "model.", "buffer.", "optimizer."


def _rng_key() -> str:
    return f"rng/{dist.get_rank() if dist.is_initialized() else 0}"


def save_run(run: Run, progress: Progress) -> str:
    """Save everything under --save; collective. Returns the directory.

    Raises RunStopped if it cannot be written; the previous checkpoint stays good.
    """
    config = run.config
    with_optimizer, with_rng = not config.no_save_optim, not config.no_save_rng
    tensors = _tensors(run, with_optimizer)
    if with_rng:
        tensors[_rng_key()] = rng.capture(run.streams, run.device)
    record = RunRecord(
        progress=progress,
        model=_model_identity(run),
        data=run.data.state_dict(),
        schedule=run.state.schedule.state_dict(),
        scaler=run.state.scaler.state_dict(),
        arguments=config.as_dict(),
        world_size=run.launch.world_size,
        has_optimizer=with_optimizer,
        has_rng=with_rng,
    )
    return str(save_checkpoint(config.save, tensors, record, retain_interval=config.save_retain_interval))


def load_run(run: Run) -> tuple[Progress, list[str]]:
    """Put the run where the checkpoint of --load left off; collective.

    Returns: (progress, lines for the log). Without a checkpoint there the run starts fresh, unless
    --exit-on-missing-checkpoint says otherwise.

    Raises ValueError for a checkpoint that is missing, damaged or of another model.
    """
    config = run.config
    if config.load is None:
        return Progress(), []
    iteration = config.ckpt_step if config.ckpt_step is not None else latest_iteration(config.load)
    if iteration is None:
        if config.exit_on_missing_checkpoint:
            raise ValueError(f"--load {config.load} holds no {MARKER}; give the --save directory of a run")
        return Progress(), [f"--load {config.load} holds no checkpoint yet: starting from the beginning"]
    record = read_record(config.load, iteration)
    check_same_model(record, _model_identity(run))
    with_optimizer = record.has_optimizer and not config.no_load_optim and not config.finetune
    same_ranks = record.world_size == run.launch.world_size
    with_rng = record.has_rng and not config.no_load_rng and not config.finetune and same_ranks
    if with_optimizer:
        shapes = read_shapes(config.load, iteration)
        fsdp_checkpoint.allocate_optimizer_state(run.state.optimizer, shapes, OPTIMIZER_PREFIX)
    tensors = _tensors(run, with_optimizer)
    if with_rng:
        tensors[_rng_key()] = rng.capture(run.streams, run.device)
    load_tensors(config.load, iteration, tensors)
    fsdp_checkpoint.mark_loaded(_wrapped(run))
    lines = [f"loaded the checkpoint of iteration {iteration} from {config.load}"]
    if config.finetune:
        return Progress(), lines
    if with_rng:
        rng.restore(tensors[_rng_key()], run.streams, run.device)
    elif record.has_rng and not config.no_load_rng:
        lines.append(
            f"random states belong to {record.world_size} ranks, this run has {run.launch.world_size}: "
            "dropout continues with fresh ones"
        )
    run.state.schedule.load_state_dict(
        dict(record.schedule),
        override=config.override_opt_param_scheduler,
        use_checkpoint=config.use_checkpoint_opt_param_scheduler,
    )
    run.state.scaler.load_state_dict(dict(record.scaler))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the same sentences come back as values
        lines += run.data.load_state_dict(record.data)
    return record.progress, lines


def _wrapped(run: Run) -> FullyShardedDataParallel:
    return cast(FullyShardedDataParallel, run.state.model)


def model_tensors(model: FullyShardedDataParallel) -> dict[str, Any]:
    """Parameters and buffers by unique names; call fsdp_checkpoint.mark_loaded after loading into them."""
    tensors: dict[str, Any] = {
        MODEL_PREFIX + name: tensor for name, tensor in fsdp_checkpoint.model_state(model).items()
    }
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, value in model.module.state_dict().items():
        if name not in parameters and isinstance(value, torch.Tensor):
            tensors[BUFFER_PREFIX + name] = value
    return tensors


def _tensors(run: Run, with_optimizer: bool) -> dict[str, Any]:
    """Everything sharded, by unique names; loading into these tensors loads the run."""
    tensors = model_tensors(_wrapped(run))
    if with_optimizer:
        for name, values in fsdp_checkpoint.optimizer_state(run.state.optimizer).items():
            for key, value in values.items():
                if value is not None:
                    tensors[f"{OPTIMIZER_PREFIX}{name}.{key}"] = value
    return tensors


def _model_identity(run: Run) -> dict[str, Any]:
    """The model's configuration as JSON has it."""
    return json.loads(json.dumps(dataclasses.asdict(run.model_config), default=str))
