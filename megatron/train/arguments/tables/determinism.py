"""Flags: determinism and faults."""

from __future__ import annotations

from megatron.train.arguments.flag import Flag, Switch, no_op, refused, works

ONE_FILE = "a dump is made once, when the watchdog ends the run"

TITLE = "Determinism and faults"

FLAGS: tuple[Flag, ...] = (
    works(
        "--deterministic-mode",
        Switch.ON,
        False,
        "Bit-equal runs: deterministic kernels only; docs/concepts/determinism.md.",
        "train/initialize.py",
        test="train/test_environment.py",
    ),
    works(
        "--rerun-mode",
        str,
        "validate_results",
        "Run a step with a faulty result again, which tells a repeatable fault from a passing one; report_stats runs"
        " every step twice.",
        "train/build.py",
        test="train/test_rerun.py",
        choices=(
            "disabled",
            "validate_results",
            "report_stats",
        ),
    ),
    works(
        "--error-injection-rate",
        int,
        0,
        "For tests of --rerun-mode: one step in so many gets a wrong loss on a rank.",
        "train/build.py",
        test="train/test_rerun.py",
    ),
    works(
        "--error-injection-type",
        str,
        "transient_error",
        "Whether an injected fault comes back in the second run.",
        "train/build.py",
        test="train/test_rerun.py",
        choices=(
            "correct_result",
            "transient_error",
            "persistent_error",
        ),
        refused_values=(
            ("correct_result", "a right result is never looked at again; use --rerun-mode report_stats"),
        ),
    ),
    works(
        "--result-rejected-tracker-filename",
        str,
        None,
        "File that gets a JSON line for each faulty result.",
        "train/build.py",
        test="train/test_rerun.py",
    ),
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
    refused("--gpu-sniff-test-interval", int, None, "GPUs are not tested beside the run; use --rerun-mode"),
    works(
        "--flight-recorder-dump-path",
        str,
        None,
        "Where torch's flight recorder is written when a run hangs; the rank is appended.",
        "train/main.py",
        test="train/test_faults.py",
    ),
    works(
        "--flight-recorder-include-stack-trace",
        Switch.ON,
        False,
        "With stacks in that file.",
        "train/main.py",
        test="train/test_faults.py",
    ),
    works(
        "--flight-recorder-trace-buffer-size",
        int,
        2000,
        "Collectives that torch's flight recorder keeps, with --flight-recorder-dump-path.",
        "train/initialize.py",
        test="train/test_faults.py",
    ),
    works(
        "--no-flight-recorder-dump-on-timeout",
        Switch.OFF,
        True,
        "No file when a run hangs; the watchdog's own words still come.",
        "train/main.py",
        test="train/test_faults.py",
        aliases=("--disable-flight-recorder-dump-on-timeout",),
        dest="flight_recorder_dump_on_timeout",
    ),
    no_op(
        "--no-flight-recorder-extra-dump-on-exec",
        Switch.OFF,
        True,
        ONE_FILE,
        aliases=("--disable-flight-recorder-extra-dump-on-exec",),
        dest="flight_recorder_extra_dump_on_exec",
    ),
    works(
        "--no-flight-recorder-include-only-active",
        Switch.OFF,
        True,
        "Collectives that ended are in that file too.",
        "train/main.py",
        test="train/test_faults.py",
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
