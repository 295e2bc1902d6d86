"""Makes what a run reports with: which numbers are taken and where they go, by the flags."""

from __future__ import annotations

from typing import TextIO

import torch
import torch.distributed as dist

from megatron.models.flops import training_flops
from megatron.models.moe.experts import global_names
from megatron.train.build import Run
from megatron.train.config import TrainConfig
from megatron.train.interval import IntervalCollector, IntervalOptions
from megatron.train.metrics import Reporter, ReportOptions
from megatron.train.sinks import JsonLines, Sink, TensorBoard, WandbOptions, WeightsAndBiases, Without
from megatron.train.timers import Timers

# TFLOP/s of dense bf16 products by a part of the device's name, from the makers' data sheets.
PEAK_TFLOPS = (
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("GH200", 989.4),
    ("H200", 989.4),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.4),
    ("H800", 989.4),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("A10", 125.0),
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
        peak_tflops=config.peak_tflops or known_peak(_device_name(run.device), config.params_dtype),
        step_interval=config.tensorboard_log_interval,
    )
    if run.launch.rank != 0:
        return Reporter(options, device=run.device)
    files = (JsonLines(config.metrics_file),) if config.metrics_file else ()
    return Reporter(options, files, stream, run.device, tuple(_boards(run)))


def known_peak(device_name: str | None, dtype: str) -> float | None:
    """TFLOP/s that a device can do, for MFU; None where its sheet is not in the table or the dtype is no 16-bit one."""
    if device_name is None or dtype not in ("bf16", "fp16"):
        return None
    return next((peak for part, peak in PEAK_TFLOPS if part in device_name), None)


def _device_name(device: torch.device) -> str | None:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def hidden_numbers(config: TrainConfig) -> tuple[str, ...]:
    """Beginnings of the names that tensorboard and wandb do not get, by the --log-...-to-tensorboard flags."""
    hidden = []
    if not config.log_timers_to_tensorboard:
        hidden.append("time/")
    if not config.log_memory_to_tensorboard:
        hidden += ["memory/", "memory_mib"]
    if not config.log_world_size_to_tensorboard:
        hidden.append("world_size")
    if not config.log_loss_scale_to_tensorboard:
        hidden.append("loss_scale")
    if not config.log_validation_ppl_to_tensorboard:
        hidden += ["lm_loss_validation_ppl", "lm_loss_test_ppl"]
    return tuple(hidden)


def _boards(run: Run) -> list[Sink]:
    config, hidden = run.config, hidden_numbers(run.config)
    boards: list[Sink] = []
    if config.tensorboard_dir:
        boards.append(Without(TensorBoard(config.tensorboard_dir, config.tensorboard_queue_size), hidden))
    if config.wandb_project:
        wandb = WandbOptions(
            config.wandb_project,
            config.wandb_exp_name,
            config.wandb_entity,
            config.wandb_save_dir,
            identity=config.save or config.wandb_save_dir,
        )
        boards.append(Without(WeightsAndBiases(wandb, config.as_dict()), hidden))
    return boards


def build_timers(run: Run) -> Timers:
    """The timers of this rank's steps."""
    config = run.config
    group = run.mesh.group("world")
    meets = config.timing_log_level >= 1 and config.barrier_with_L1_time and group is not None
    return Timers(
        config.timing_log_level,
        run.device,
        (lambda: dist.barrier(group)) if meets else None,
        memory=config.log_memory_to_tensorboard,
    )


def build_collector(run: Run, timers: Timers) -> IntervalCollector:
    """What ranks exchange at the end of a log interval."""
    config = run.config
    options = IntervalOptions(
        timing_option=config.timing_log_option,
        stragglers=max(1, config.straggler_minmax_count) if config.log_straggler else 0,
        per_parameter=config.log_norms_per_parameter,
    )
    return IntervalCollector(options, timers, run.mesh, global_names(run.mesh, config.num_experts))
