"""Flags: ours, which Megatron does not have."""

from __future__ import annotations

from megatron.train.arguments.flag import Flag, Switch, works

TITLE = "Additions of this project"

FLAGS: tuple[Flag, ...] = (
    works(
        "--validate-only",
        Switch.ON,
        False,
        "Check the flags for the world size of torchrun's environment, print the resolved "
        "configuration as JSON "
        "and stop.",
        "train/main.py",
        test="train/test_arguments_scripts.py",
    ),
    works(
        "--fp64",
        Switch.ON,
        False,
        "Compute, accumulate and keep everything in float64, for tests of equality.",
        "train/arguments/resolve.py",
        test="train/test_resume.py",
    ),
    works(
        "--pipeline-schedule",
        str,
        None,
        "Order of work in a pipeline; left out: 1f1b, interleaved with several stages on a rank, zero-bubble with"
        " --delay-wgrad-compute.",
        "train/pipeline.py",
        test="train/test_pipeline_arguments.py",
        choices=("gpipe", "1f1b", "interleaved", "zero-bubble"),
    ),
    works(
        "--fsdp-order-check-interval",
        int,
        100,
        "Steps after which ranks compare in which order they gathered and reduced, 16 bytes a group; 0: never.",
        "train/build.py",
        test="train/test_order.py",
    ),
    works(
        "--optimizer-impl",
        str,
        "auto",
        "Its implementation; auto: Transformer Engine's or apex's on CUDA where installed, else torch's.",
        "train/optimizer.py",
        test="train/test_optimizer.py",
    ),
    works(
        "--metrics-file",
        str,
        None,
        "File that gets one JSON object per log interval and evaluation.",
        "train/report.py",
        test="train/test_main.py",
    ),
    works(
        "--log-norms-per-parameter",
        Switch.ON,
        False,
        "The norm of every parameter and of its gradient, in files, at every --log-interval.",
        "train/report.py",
        test="train/test_observe.py",
    ),
    works(
        "--peak-tflops",
        float,
        None,
        "TFLOP/s that one device can do, for the share of it that is used (MFU); known GPUs need it not.",
        "train/report.py",
        test="train/test_observe.py",
    ),
)
