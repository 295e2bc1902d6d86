"""From a command line to the end of a run: parse -> build -> train."""

from __future__ import annotations

import faulthandler
import logging
import sys
from collections.abc import Sequence

import torch.distributed as dist

from megatron.train.config import TrainConfig
from megatron.train.errors import one_line_errors
from megatron.train.initialize import (
    Launch,
    ProcessGroupOptions,
    declared_world_size,
    initialize_distributed,
    prepare_environment,
    quiet_libraries,
    read_launch,
    seed_everything,
    sum_bf16_products_in_fp32,
)

_GROUP_MARGIN_MINUTES = 2.0


def main(argv: Sequence[str] | None = None, defaults: dict[str, object] | None = None) -> None:
    """Run a pretraining job.

    Args:
        argv: words of the command line; default: this process's.
        defaults: other defaults by destination (a preset); what the user gives wins over them.

    Ends the process with a status: 0 done, 2 the user's error (one line), 1 a bug, 3 another rank has gone, 4 the run
    stands still.
    """
    quiet_libraries()
    with one_line_errors():
        launch = read_launch()
    with one_line_errors(launch.rank):
        _run(argv, defaults, launch)


def _run(argv: Sequence[str] | None, defaults: dict[str, object] | None, launch: Launch) -> None:
    from megatron.train.arguments import parse_args, validate
    from megatron.train.arguments.saved import complete_from_checkpoint

    arguments, from_checkpoint = complete_from_checkpoint(parse_args(argv, defaults))
    world_size = declared_world_size(launch) if arguments.validate_only else launch.world_size
    config = validate(arguments, world_size)
    if config.validate_only:
        if launch.rank == 0:
            print(config.to_json())
            for line in [*from_checkpoint, *config.warnings]:
                print(line, file=sys.stderr)
        return
    if config.logging_level is not None:
        logging.getLogger().setLevel(config.logging_level)
    if config.disable_bf16_reduced_precision_matmul:
        sum_bf16_products_in_fp32()
    prepare_environment(config)
    if not faulthandler.is_enabled():
        faulthandler.enable()  # a library that aborts (gloo, when sizes differ) shows where each thread was
    # The watchdog speaks before a process group ends the run without a reason.
    timeout = max(config.distributed_timeout_minutes, _stall_seconds(config) / 60.0) + _GROUP_MARGIN_MINUTES
    options = ProcessGroupOptions(config.distributed_backend, config.device, timeout)
    device = initialize_distributed(launch, options)
    seed_everything(config.seed)
    # What is below takes a second to import; an error above needs none of it.
    from megatron.fsdp.collectives import Communicator
    from megatron.parallel.flight import RECORDER
    from megatron.train.build import build_run, describe
    from megatron.train.loop import train
    from megatron.train.report import build_reporter
    from megatron.train.watchdog import Watchdog, WatchdogOptions

    Communicator.observer = RECORDER
    run = build_run(config, launch, device)
    reporter = build_reporter(run, sys.stdout)
    for line in [*from_checkpoint, *config.warnings, *config.notes, *describe(run)]:
        reporter.message(line)
    watching = WatchdogOptions(
        _stall_seconds(config),
        config.flight_recorder_dump_path if config.flight_recorder_dump_on_timeout else None,
        config.flight_recorder_include_stack_trace,
        config.flight_recorder_include_only_active,
    )
    with Watchdog(watching, launch.rank, launch.world_size) as watchdog:
        train(run, reporter, watchdog)
    dist.destroy_process_group()


def _stall_seconds(config: TrainConfig) -> float:
    """How long a rank may make no progress, once the run is built."""
    seconds = config.distributed_timeout_seconds_after_init
    return 60.0 * config.distributed_timeout_minutes if seconds is None else float(seconds)
