"""Flags: processes and communication."""

from __future__ import annotations

from megatron.train.arguments.flag import Flag, Switch, no_op, works

TITLE = "Processes and communication"

FLAGS: tuple[Flag, ...] = (
    works(
        "--distributed-backend",
        str,
        "auto",
        "nccl, gloo or auto (our addition and our default): nccl on CUDA, else gloo; an "
        "explicit nccl on a machine without CUDA runs as gloo with one warning.",
        "train/arguments/resolve.py",
        test="train/test_arguments.py",
        choices=(
            "nccl",
            "gloo",
            "auto",
        ),
    ),
    works(
        "--distributed-timeout-minutes",
        int,
        10,
        "How long a rank may make no progress before the watchdog says why and ends the run.",
        "train/main.py",
        test="train/test_flags_at_work.py",
    ),
    works(
        "--distributed-timeout-seconds-after-init",
        int,
        None,
        "The same in seconds, for the time after the run was built; 0 turns the watchdog off.",
        "train/main.py",
        test="train/test_faults.py",
    ),
    no_op(
        "--disable-gloo-process-groups",
        Switch.OFF,
        True,
        "gloo groups beside NCCL are made only where they are needed",
        dest="use_gloo_process_groups",
    ),
    no_op("--use-sharp", Switch.ON, False, "tunes a cluster's network"),
    no_op(
        "--sharp-enabled-group",
        str,
        None,
        "tunes a cluster's network",
        choices=(
            "dp",
            "dp_replica",
        ),
    ),
    works(
        "--nccl-communicator-config-path",
        str,
        None,
        "YAML file: group -> option of NCCL's communicator -> value.",
        "train/build.py",
        test="train/test_environment.py",
    ),
    works(
        "--high-priority-stream-groups",
        str,
        [],
        "Groups whose collectives run on streams of high priority.",
        "train/build.py",
        test="train/test_environment.py",
        nargs="+",
    ),
    no_op(
        "--create-all-gather-group",
        Switch.ON,
        False,
        "gathers and reductions always use communicators of their own",
    ),
)
