"""Flags: determinism and faults."""

from __future__ import annotations

from megatron.train.arguments.flag import Flag, Switch, not_yet, refused, works

NO_RERUN = "rerunning a faulty step is planned; use --rerun-mode disabled"
NO_WATCHDOG = "the watchdog is planned; --distributed-timeout-minutes ends a hanging run"

TITLE = "Determinism and faults"

FLAGS: tuple[Flag, ...] = (
    works(
        "--deterministic-mode",
        Switch.ON,
        False,
        "Bit-equal runs: deterministic kernels only.",
        "train/main.py",
        test="train/test_arguments_scripts.py",
    ),
    not_yet(
        "--rerun-mode",
        str,
        "validate_results",
        NO_RERUN,
        choices=(
            "disabled",
            "validate_results",
            "report_stats",
        ),
        also_accepted=("disabled",),
    ),
    not_yet("--error-injection-rate", int, 0, NO_RERUN),
    not_yet(
        "--error-injection-type",
        str,
        "transient_error",
        NO_RERUN,
        choices=(
            "correct_result",
            "transient_error",
            "persistent_error",
        ),
    ),
    not_yet("--result-rejected-tracker-filename", str, None, NO_RERUN),
    refused("--batch-invariant-mode", Switch.ON, False, "batch-invariant kernels belong to inference"),
    refused(
        "--batch-invariant-backend",
        str,
        "te_native",
        "batch-invariant kernels belong to inference",
        choices=(
            "te_native",
            "deepgemm",
            "triton",
        ),
    ),
    not_yet("--gpu-sniff-test-interval", int, None, "the self-test of GPUs is not there"),
    not_yet("--flight-recorder-dump-path", str, None, NO_WATCHDOG),
    not_yet("--flight-recorder-include-stack-trace", Switch.ON, False, NO_WATCHDOG),
    not_yet("--flight-recorder-trace-buffer-size", int, 2000, NO_WATCHDOG),
    not_yet(
        "--no-flight-recorder-dump-on-timeout",
        Switch.OFF,
        True,
        NO_WATCHDOG,
        aliases=("--disable-flight-recorder-dump-on-timeout",),
        dest="flight_recorder_dump_on_timeout",
    ),
    not_yet(
        "--no-flight-recorder-extra-dump-on-exec",
        Switch.OFF,
        True,
        NO_WATCHDOG,
        aliases=("--disable-flight-recorder-extra-dump-on-exec",),
        dest="flight_recorder_extra_dump_on_exec",
    ),
    not_yet(
        "--no-flight-recorder-include-only-active",
        Switch.OFF,
        True,
        NO_WATCHDOG,
        aliases=("--disable-flight-recorder-include-only-active",),
        dest="flight_recorder_include_only_active",
    ),
    refused(
        "--adlr-autoresume",
        Switch.ON,
        False,
        "a service of one cluster; use --exit-signal-handler and --load",
    ),
    refused("--adlr-autoresume-interval", int, 1000, "see --adlr-autoresume"),
    refused(
        "--enable-ft-package",
        Switch.ON,
        False,
        "needs nvidia-resiliency-ext; use torchrun --max-restarts with --load",
    ),
    refused("--calc-ft-timeouts", Switch.ON, False, "see --enable-ft-package"),
    refused("--ft-num-warmup-iters", int, 5, "see --enable-ft-package"),
    refused("--run-workload-inspector-server", Switch.ON, False, "a service of one cluster"),
)
