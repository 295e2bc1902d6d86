"""Makes the reporter of a run: which numbers go where, by the flags."""

from __future__ import annotations

from typing import TextIO

from megatron.models.flops import training_flops
from megatron.train.build import Run
from megatron.train.metrics import (
    JsonLines,
    Reporter,
    ReportOptions,
    Sink,
    TensorBoard,
    WandbOptions,
    WeightsAndBiases,
)


def build_reporter(run: Run, stream: TextIO) -> Reporter:
    """The reporter of this rank: rank 0 writes, the others only count."""
    config = run.config
    options = ReportOptions(
        train_iters=config.train_iters or 0,
        log_interval=config.log_interval,
        global_batch_size=config.global_batch_size,
        tokens_per_step=config.global_batch_size * config.seq_length,
        flops_per_step=training_flops(run.model_config, config.seq_length) * config.global_batch_size,
        world_size=run.launch.world_size,
        show_throughput=config.log_throughput,
        per_layer=config.moe_per_layer_logging,
    )
    if run.launch.rank != 0:
        return Reporter(options, device=run.device)
    return Reporter(options, tuple(_sinks(run)), stream, run.device)


def _sinks(run: Run) -> list[Sink]:
    config = run.config
    sinks: list[Sink] = []
    if config.metrics_file:
        sinks.append(JsonLines(config.metrics_file))
    if config.tensorboard_dir:
        sinks.append(TensorBoard(config.tensorboard_dir, config.tensorboard_queue_size))
    if config.wandb_project:
        wandb = WandbOptions(
            config.wandb_project, config.wandb_exp_name, config.wandb_entity, config.wandb_save_dir
        )
        sinks.append(WeightsAndBiases(wandb, config.as_dict()))
    return sinks
