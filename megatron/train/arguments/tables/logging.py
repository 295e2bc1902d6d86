"""Flags: logs."""

from __future__ import annotations

from megatron.train.arguments.flag import Flag, Switch, no_op, not_yet, refused, works

NO_STRAGGLERS = "the report of slow ranks is planned; use --profile"
NO_ONE_LOGGER = "One Logger is not used"
NO_OTEL = "use tensorboard, wandb or metrics.jsonl"

TITLE = "Logs"

FLAGS: tuple[Flag, ...] = (
    works(
        "--log-interval",
        int,
        100,
        "Steps between log lines.",
        "train/metrics.py",
        test="train/test_arguments_scripts.py",
    ),
    works(
        "--log-params-norm",
        Switch.ON,
        False,
        "The norm of all parameters in the log.",
        "train/loop.py",
        test="train/test_arguments_scripts.py",
    ),
    works(
        "--log-num-zeros-in-grad",
        Switch.ON,
        False,
        "The number of zero gradients in the log.",
        "train/build.py",
        test="train/test_arguments_scripts.py",
    ),
    works(
        "--log-throughput",
        Switch.ON,
        False,
        "TFLOP/s per rank in the log line.",
        "train/report.py",
        test="train/test_arguments_scripts.py",
    ),
    not_yet("--log-progress", Switch.ON, False, "progress.txt is not written; metrics.jsonl has every step"),
    not_yet("--log-memory-interval", int, None, "memory is reported at every --log-interval"),
    not_yet("--log-device-memory-used", Switch.ON, False, "memory is that of this process"),
    not_yet("--log-energy", Switch.ON, False, "energy is not measured"),
    no_op(
        "--log-timers-to-tensorboard",
        Switch.ON,
        False,
        "the time of an iteration is always there; its phases are seen with --profile",
    ),
    no_op("--log-memory-to-tensorboard", Switch.ON, False, "memory is always among the numbers"),
    no_op(
        "--log-validation-ppl-to-tensorboard", Switch.ON, False, "the perplexity is always among the numbers"
    ),
    no_op(
        "--log-world-size-to-tensorboard",
        Switch.ON,
        False,
        "the number of ranks is in the log and in the configuration",
    ),
    no_op(
        "--no-log-loss-scale-to-tensorboard",
        Switch.OFF,
        True,
        "the loss scale is always among the numbers",
        aliases=("--disable-log-loss-scale-to-tensorboard",),
        dest="log_loss_scale_to_tensorboard",
    ),
    works(
        "--tensorboard-dir",
        str,
        None,
        "Folder for tensorboard.",
        "train/profiler.py",
        test="train/test_arguments_scripts.py",
    ),
    not_yet("--tensorboard-log-interval", int, 1, "a point is written at every --log-interval"),
    works(
        "--tensorboard-queue-size",
        int,
        1000,
        "Points that tensorboard keeps before it writes.",
        "train/report.py",
    ),
    works(
        "--wandb-project",
        str,
        None,
        "Weights & Biases project.",
        "train/report.py",
        test="train/test_arguments_scripts.py",
    ),
    works(
        "--wandb-exp-name",
        str,
        None,
        "Weights & Biases name of the run.",
        "train/report.py",
        test="train/test_arguments_scripts.py",
    ),
    works(
        "--wandb-entity",
        str,
        None,
        "Weights & Biases team.",
        "train/report.py",
        test="train/test_arguments_scripts.py",
    ),
    works(
        "--wandb-save-dir",
        str,
        None,
        "Weights & Biases folder.",
        "train/report.py",
        test="train/test_arguments_scripts.py",
    ),
    no_op(
        "--timing-log-level",
        int,
        0,
        "phases are seen with --profile, the log has the time of an iteration",
        choices=(
            0,
            1,
            2,
        ),
    ),
    no_op(
        "--timing-log-option",
        str,
        "minmax",
        "phases are seen with --profile, the log has the time of an iteration",
        choices=(
            "max",
            "minmax",
            "all",
        ),
    ),
    no_op(
        "--no-barrier-with-level-1-timing",
        Switch.OFF,
        True,
        "phases are seen with --profile, the log has the time of an iteration",
        dest="barrier_with_L1_time",
    ),
    works("--logging-level", int, None, "Level of Python's logging.", "train/main.py"),
    not_yet("--log-straggler", Switch.ON, False, NO_STRAGGLERS),
    not_yet("--disable-straggler-on-startup", Switch.ON, False, NO_STRAGGLERS),
    not_yet("--straggler-ctrlr-port", int, 65535, NO_STRAGGLERS),
    not_yet("--straggler-minmax-count", int, 1, NO_STRAGGLERS),
    no_op("--no-one-logger", Switch.OFF, True, NO_ONE_LOGGER, dest="enable_one_logger"),
    no_op("--one-logger-async", Switch.ON, False, NO_ONE_LOGGER),
    no_op("--one-logger-project", str, "megatron-lm", NO_ONE_LOGGER),
    no_op("--one-logger-run-name", str, None, NO_ONE_LOGGER),
    no_op("--app-tag-run-name", str, None, NO_ONE_LOGGER),
    no_op("--app-tag-run-version", str, "0.0.0", NO_ONE_LOGGER),
    not_yet("--config-logger-dir", str, "", "the configuration is printed by --validate-only"),
    not_yet("--save-activations-interval", int, None, "activations are not written to files"),
    not_yet("--save-dgrads-interval", int, None, "gradients are not written to files"),
    not_yet("--save-wgrads-interval", int, None, "gradients are not written to files"),
    not_yet("--save-params-interval", int, None, "parameters are not written to files"),
    not_yet("--save-tokens-per-expert-interval", int, None, "router counts are not written to files"),
    refused("--otel-enabled", Switch.ON, False, NO_OTEL),
    refused("--otel-service-name", str, None, NO_OTEL),
    refused("--otel-span-groups", str, None, NO_OTEL),
)
