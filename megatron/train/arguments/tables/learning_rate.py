"""Flags: learning rate."""

from __future__ import annotations

from megatron.train.arguments.flag import Flag, Switch, refused, works

TITLE = "Learning rate"

FLAGS: tuple[Flag, ...] = (
    works("--lr", float, None, "Highest learning rate.", "train/lr_schedule.py"),
    works(
        "--min-lr",
        float,
        0.0,
        "Lowest learning rate of the decay.",
        "train/lr_schedule.py",
        test="train/test_lr_schedule.py",
    ),
    works(
        "--lr-decay-style",
        str,
        "linear",
        "constant, linear, cosine, inverse-square-root or WSD.",
        "train/lr_schedule.py",
        test="train/test_lr_schedule.py",
        choices=(
            "constant",
            "linear",
            "cosine",
            "inverse-square-root",
            "WSD",
        ),
    ),
    works(
        "--lr-decay-iters",
        int,
        None,
        "Steps over which the rate decays; --train-iters when not given.",
        "train/lr_schedule.py",
    ),
    works(
        "--lr-decay-samples", int, None, "The same in samples, with --train-samples.", "train/lr_schedule.py"
    ),
    works(
        "--lr-warmup-iters",
        int,
        0,
        "Steps of linear warm-up.",
        "train/lr_schedule.py",
        test="train/test_lr_schedule.py",
    ),
    works(
        "--lr-warmup-samples", int, 0, "The same in samples, with --train-samples.", "train/lr_schedule.py"
    ),
    works(
        "--lr-warmup-fraction",
        float,
        None,
        "Part of the decay steps used for warm-up.",
        "train/lr_schedule.py",
        test="train/test_lr_schedule.py",
    ),
    works(
        "--lr-warmup-init",
        float,
        0.0,
        "Rate at the start of the warm-up.",
        "train/lr_schedule.py",
        test="train/test_lr_schedule.py",
    ),
    works(
        "--lr-wsd-decay-style",
        str,
        "exponential",
        "The last phase of WSD: exponential, linear, cosine or minus_sqrt.",
        "train/lr_schedule.py",
        test="train/test_lr_schedule.py",
        choices=(
            "exponential",
            "linear",
            "cosine",
            "minus_sqrt",
        ),
    ),
    works(
        "--lr-wsd-decay-iters",
        int,
        None,
        "Steps of the last phase of WSD.",
        "train/lr_schedule.py",
        test="train/test_lr_schedule.py",
    ),
    works(
        "--lr-wsd-decay-samples",
        int,
        None,
        "The same in samples, with --train-samples.",
        "train/lr_schedule.py",
    ),
    works("--decoupled-lr", float, None, "Learning rate of embedding and head.", "train/optimizer.py"),
    works(
        "--decoupled-min-lr", float, None, "Lowest learning rate of embedding and head.", "train/optimizer.py"
    ),
    works(
        "--override-opt_param-scheduler",
        Switch.ON,
        False,
        "Take the schedule of the command line, not the checkpoint's.",
        "train/lr_schedule.py",
        aliases=("--override-opt-param-scheduler",),
    ),
    works(
        "--use-checkpoint-opt_param-scheduler",
        Switch.ON,
        False,
        "Take the checkpoint's schedule, not the command line's.",
        "train/lr_schedule.py",
        aliases=("--use-checkpoint-opt-param-scheduler",),
    ),
    refused("--warmup", int, None, "no longer Megatron's; use --lr-warmup-fraction"),
)
