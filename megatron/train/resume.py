"""Between a run and its checkpoints: what goes in, what comes out, and what of it the flags ask for."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from megatron.fsdp import FullyShardedDataParallel
from megatron.fsdp import checkpoint as fsdp_checkpoint
from megatron.train import rng
from megatron.train.build import Run
from megatron.train.checkpoint import (
    MARKER,
    ChoiceOptions,
    DamagedCheckpointError,
    Found,
    LoadOptions,
    Progress,
    Ranks,
    Retention,
    RunRecord,
    Saver,
    Target,
    check_same_model,
    choose_checkpoint,
    load_tensors,
    read_record,
    read_shapes,
)
from megatron.train.config import TrainConfig

MODEL_PREFIX, BUFFER_PREFIX, OPTIMIZER_PREFIX, RNG_PREFIX = "model.", "buffer.", "optimizer.", "rng/"
# A rank's place on these axes says which random streams are its own.
LAYOUT_AXES = ("tp", "cp", "dp_shard", "dp_outer", "pp", "ep", "etp")


class RunSaver:
    """Saves a run, as its flags say; collective to make and to use."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.saver = Saver(Ranks(run.mesh.world_on_cpu()), background=run.config.async_save)

    @property
    def failed(self) -> bool:
        """Whether a save in the background has failed; the next `save` or `finish` raises."""
        return self.saver.failed

    def save(self, progress: Progress, *, persistent: bool = True) -> str:
        """Save everything under --save, or begin to (--async-save). Returns the line for the log.

        persistent: False for one that the next of its kind replaces (--non-persistent-save-interval).

        Raises RunStopped if it, or the one before it in the background, could not be written; the last one that could
        stays good.
        """
        config = self.run.config
        tensors = _tensors(self.run, with_optimizer=not config.no_save_optim)
        if not config.no_save_rng:
            tensors[_rng_key()] = rng.capture(self.run.streams, self.run.device)
        root, retention = Path(config.save), Retention(config.save_retain_interval)
        if not persistent:
            root, retention = _non_persistent_root(config, config.save), Retention(only_newest=True)
        directory = self.saver.save(Target(root, _record(self.run, progress), retention), tensors)
        if config.async_save:
            return f"saving the checkpoint of iteration {progress.iteration} to {directory} in the background"
        return "".join(self.news())

    def news(self) -> list[str]:
        """A line for each checkpoint completed since the last call."""
        return [
            f"saved the checkpoint of iteration {target.record.progress.iteration} to {target.directory}"
            for target in self.saver.take_finished()
        ]

    def finish(self) -> list[str]:
        """Wait for a save in the background; returns its line. Raises RunStopped if it failed."""
        self.saver.finish()
        return self.news()

    def wait(self) -> None:
        """Wait for a save in the background, however it ends."""
        self.saver.wait()


def load_run(run: Run) -> tuple[Progress, list[str]]:
    """Put the run where the checkpoint of --load left off; collective.

    Returns: (progress, lines for the log). Without a checkpoint there the run starts fresh, unless
    --exit-on-missing-checkpoint says otherwise. A newer checkpoint that is not whole is passed over with a warning.

    Raises ValueError for a checkpoint that is missing, damaged or of another model.
    """
    config = run.config
    if config.load is None:
        return _load_pretrained(run)
    bad: dict[Path, dict[int, str]] = {}
    while True:
        chosen = _choose(config, Ranks(), bad)
        if chosen is None:
            if config.exit_on_missing_checkpoint:
                raise ValueError(
                    f"--load {config.load} holds no {MARKER}; give the --save directory of a run"
                )
            missing = f"--load {config.load} holds no checkpoint yet: starting from the beginning"
            progress, lines = _load_pretrained(run)
            return progress, [missing, *lines]
        root, found = chosen
        try:
            progress, lines = _load(run, root, found.iteration)
        except DamagedCheckpointError as error:
            if config.ckpt_step is not None:
                raise
            bad.setdefault(root, {})[found.iteration] = str(error).removeprefix("--load: ")
            continue
        passed_over = [
            f"warning: {warning}: loading iteration {found.iteration} instead" for warning in found.warnings
        ]
        return progress, [*passed_over, *lines]


def _load_pretrained(run: Run) -> tuple[Progress, list[str]]:
    """Where the run has no checkpoint of its own: the weights of --pretrained-checkpoint, as --finetune takes them."""
    source = run.config.pretrained_checkpoint
    if source is None:
        return Progress(), []
    changes = {
        "load": source,
        "finetune": True,
        "pretrained_checkpoint": None,
        "exit_on_missing_checkpoint": True,
    }
    return load_run(dataclasses.replace(run, config=run.config.replace(**changes, ckpt_step=None)))


def _choose(
    config: TrainConfig, ranks: Ranks, bad: Mapping[Path, Mapping[int, str]]
) -> tuple[Path, Found] | None:
    """The newest whole checkpoint of --load and of the non-persistent ones beside it; --ckpt-step is of --load."""
    root = Path(config.load)
    both = [root] if config.ckpt_step is not None else [root, _non_persistent_root(config, config.load)]
    chosen, errors = [], []
    for one in both:
        try:
            found = choose_checkpoint(
                str(one),
                ranks,
                ChoiceOptions(config.ckpt_step, contents=True, bad=bad.get(one, {})),
            )
        except ValueError as error:
            errors.append(error)
            continue
        if found is not None:
            chosen.append((one, found))
    if not chosen:
        if errors:
            raise ValueError(str(errors[0]))
        return None
    best, found = max(chosen, key=lambda pair: pair[1].iteration)
    return best, replace(found, warnings=(*found.warnings, *(str(error) for error in errors)))


def _non_persistent_root(config: TrainConfig, root: str) -> Path:
    return Path(config.non_persistent_global_ckpt_dir or Path(root) / "non_persistent")


def _load(run: Run, root: Path, iteration: int) -> tuple[Progress, list[str]]:
    """Load one checkpoint; what the flags do not ask for stays in it."""
    config = run.config
    record = read_record(root, iteration)
    check_same_model(record, _model_identity(run))
    with_optimizer = record.has_optimizer and not config.no_load_optim and not config.finetune
    wants_rng = record.has_rng and not config.no_load_rng and not config.finetune
    with_rng = wants_rng and _same_layout(record, run)
    if with_optimizer:
        shapes = read_shapes(root, iteration)
        fsdp_checkpoint.allocate_optimizer_state(run.state.optimizer, shapes, OPTIMIZER_PREFIX)
    tensors = _tensors(run, with_optimizer)
    if with_rng:
        tensors[_rng_key()] = rng.capture(run.streams, run.device)
    not_wanted = (RNG_PREFIX,) if with_optimizer else (RNG_PREFIX, OPTIMIZER_PREFIX)
    told = load_tensors(root, iteration, tensors, LoadOptions(config.dist_ckpt_strictness, not_wanted))
    fsdp_checkpoint.mark_loaded(_wrapped(run))
    lines = [f"loaded the checkpoint of iteration {iteration} from {root}", *told]
    if with_optimizer:
        fsdp_checkpoint.finish_optimizer_load(run.state.optimizer)
    if config.finetune:
        return Progress(), lines
    if with_rng:
        rng.restore(tensors[_rng_key()], run.streams, run.device)
    elif wants_rng:
        lines.append(
            f"random states belong to {record.world_size} ranks{_in_words(record.layout)}, this run has "
            f"{run.launch.world_size}{_in_words(_layout(run))}: dropout continues with fresh ones"
        )
    if config.fp8 is not None and config.fp8_recipe == "delayed":
        lines.append(
            "--fp8-recipe delayed: the maxima behind its scales are not in checkpoints and start anew"
        )
    if record.schedule:  # a converted model has none: this run's begins
        run.state.schedule.load_state_dict(
            dict(record.schedule),
            override=config.override_opt_param_scheduler,
            use_checkpoint=config.use_checkpoint_opt_param_scheduler,
        )
    if record.scaler:
        run.state.scaler.load_state_dict(dict(record.scaler))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the same sentences come back as values
        lines += run.data.load_state_dict(record.data)
    return record.progress, lines


def _record(run: Run, progress: Progress) -> RunRecord:
    return RunRecord(
        progress=progress,
        model=_model_identity(run),
        data=run.data.state_dict(),
        schedule=run.state.schedule.state_dict(),
        scaler=run.state.scaler.state_dict(),
        arguments=run.config.as_dict(),
        world_size=run.launch.world_size,
        layout=_layout(run),
        has_optimizer=not run.config.no_save_optim,
        has_rng=not run.config.no_save_rng,
    )


def _rng_key() -> str:
    return f"{RNG_PREFIX}{dist.get_rank() if dist.is_initialized() else 0}"


def _layout(run: Run) -> dict[str, int]:
    return {axis: run.mesh.size(axis) for axis in LAYOUT_AXES}


def _same_layout(record: RunRecord, run: Run) -> bool:
    """Whether a rank's number means the same place there and here."""
    same_ranks = record.world_size == run.launch.world_size
    return same_ranks and (not record.layout or record.layout == _layout(run))


def _in_words(layout: Mapping[str, int]) -> str:
    """ " (tp 2, pp 2)", without the axes of one rank."""
    parts = [f"{axis} {size}" for axis, size in layout.items() if size > 1]
    return f" ({', '.join(parts)})" if parts else ""


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
