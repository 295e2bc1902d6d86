"""Flags: restarts and fault injection inside a process."""

from __future__ import annotations

from megatron.train.arguments.flag import Flag, Switch, refused

RESTART = "needs nvidia-resiliency-ext; use torchrun --max-restarts with --load"

TITLE = "Restarts and fault injection inside a process"

FLAGS: tuple[Flag, ...] = (
    refused("--fault-injector-delay-start-iteration", int, None, RESTART),
    refused("--fault-injector-fault-delay", float, None, RESTART),
    refused("--fault-injector-fault-probabilities", str, None, RESTART),
    refused("--fault-injector-fault-types", str, None, RESTART),
    refused("--fault-injector-mtti-seconds", float, None, RESTART),
    refused("--fault-injector-num-ranks", int, None, RESTART),
    refused("--fault-injector-offset-seconds", float, None, RESTART),
    refused("--fault-injector-ranks", str, None, RESTART),
    refused("--fault-injector-seed", int, None, RESTART),
    refused("--inprocess-active-world-size", int, 1, RESTART),
    refused("--inprocess-barrier-timeout", float, 120, RESTART),
    refused("--inprocess-completion-timeout", float, 120, RESTART),
    refused("--inprocess-empty-cuda-cache", Switch.ON, False, RESTART),
    refused(
        "--inprocess-granularity",
        str,
        "node",
        RESTART,
        choices=(
            "node",
            "rank",
        ),
    ),
    refused("--inprocess-hard-timeout", float, 90, RESTART),
    refused("--inprocess-heartbeat-interval", float, 30, RESTART),
    refused("--inprocess-heartbeat-timeout", float, 60, RESTART),
    refused("--inprocess-last-call-wait", float, 1, RESTART),
    refused("--inprocess-max-iterations", int, None, RESTART),
    refused("--inprocess-monitor-process-interval", float, 1.0, RESTART),
    refused("--inprocess-monitor-thread-interval", float, 1.0, RESTART),
    refused("--inprocess-progress-watchdog-interval", float, 1.0, RESTART),
    refused("--inprocess-restart", Switch.ON, False, RESTART),
    refused("--inprocess-soft-timeout", float, 60, RESTART),
    refused("--inprocess-termination-grace-time", float, 1, RESTART),
)
