"""Flags: processes and communication."""

from __future__ import annotations

from megatron.train.arguments.flag import Flag, Switch, no_op, not_yet, works

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
        "How long a collective may take.",
        "train/main.py",
        test="train/test_arguments_scripts.py",
    ),
    not_yet("--distributed-timeout-seconds-after-init", int, None, "use --distributed-timeout-minutes"),
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
    not_yet(
        "--nccl-communicator-config-path", str, None, "options of NCCL communicators are not set by file"
    ),
    not_yet(
        "--high-priority-stream-groups", str, [], "priorities of communication streams are not set", nargs="+"
    ),
    no_op(
        "--create-all-gather-group",
        Switch.ON,
        False,
        "gathers and reductions always use communicators of their own",
    ),
)
