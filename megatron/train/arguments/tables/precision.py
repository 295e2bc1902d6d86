"""Flags: precision."""

from __future__ import annotations

from megatron.train.arguments.flag import Flag, Switch, no_op, not_yet, refused, works

NO_FP8 = "FP8 is planned for Transformer Engine on GPUs; use --bf16"
NO_FP4 = "FP4 training is experimental; use --bf16"

TITLE = "Precision"

FLAGS: tuple[Flag, ...] = (
    works(
        "--bf16",
        Switch.ON,
        False,
        "Compute in bf16.",
        "train/arguments/resolve.py",
        test="train/test_arguments.py",
    ),
    works(
        "--fp16",
        Switch.ON,
        False,
        "Compute in fp16 with a loss scale.",
        "train/arguments/resolve.py",
        test="train/test_arguments.py",
    ),
    works(
        "--loss-scale",
        float,
        None,
        "A fixed loss scale; without it fp16 uses a dynamic one.",
        "train/loss_scale.py",
        test="train/test_loss_scale.py",
    ),
    works(
        "--initial-loss-scale",
        float,
        4294967296,
        "First value of the dynamic loss scale.",
        "train/loss_scale.py",
        test="train/test_loss_scale.py",
    ),
    works(
        "--min-loss-scale",
        float,
        1.0,
        "Lowest dynamic loss scale.",
        "train/loss_scale.py",
        test="train/test_loss_scale.py",
    ),
    works(
        "--loss-scale-window",
        float,
        1000,
        "Steps without overflow before the dynamic loss scale doubles.",
        "train/loss_scale.py",
        test="train/test_loss_scale.py",
    ),
    works(
        "--hysteresis",
        int,
        2,
        "Overflows before the dynamic loss scale halves.",
        "train/loss_scale.py",
        test="train/test_loss_scale.py",
    ),
    not_yet(
        "--disable-bf16-reduced-precision-matmul",
        Switch.ON,
        False,
        "torch's setting for bf16 products is not changed",
    ),
    not_yet(
        "--fp8-format",
        str,
        None,
        NO_FP8,
        choices=(
            "e4m3",
            "hybrid",
        ),
        dest="fp8",
    ),
    not_yet(
        "--fp8-recipe",
        str,
        "delayed",
        NO_FP8,
        choices=(
            "tensorwise",
            "delayed",
            "mxfp8",
            "blockwise",
            "custom",
        ),
    ),
    not_yet("--fp8-param-gather", Switch.ON, False, NO_FP8),
    not_yet("--fp8-margin", int, 0, NO_FP8),
    no_op("--fp8-interval", int, 1, "Megatron ignores it as well"),
    not_yet("--fp8-amax-history-len", int, 1, NO_FP8),
    not_yet(
        "--fp8-amax-compute-algo",
        str,
        "most_recent",
        NO_FP8,
        choices=(
            "most_recent",
            "max",
        ),
    ),
    not_yet("--no-fp8-wgrad", Switch.OFF, True, NO_FP8, aliases=("--disable-fp8-wgrad",), dest="fp8_wgrad"),
    not_yet("--fp8-output-proj", Switch.ON, False, NO_FP8),
    refused("--fp8-quantizer-factory", str, None, "recipes are chosen by --fp8-recipe"),
    not_yet("--first-last-layers-bf16", Switch.ON, False, NO_FP8),
    not_yet("--num-layers-at-start-in-bf16", int, 1, NO_FP8),
    not_yet("--num-layers-at-end-in-bf16", int, 1, NO_FP8),
    not_yet("--reuse-grad-buf-for-mxfp8-param-ag", Switch.ON, False, NO_FP8),
    refused("--te-precision-config-file", str, None, "recipes are chosen by --fp8-recipe"),
    refused("--fp4-format", str, None, NO_FP4, choices=("e2m1",), dest="fp4"),
    refused("--fp4-param-gather", Switch.ON, False, NO_FP4),
    refused(
        "--fp4-recipe",
        str,
        "nvfp4",
        NO_FP4,
        choices=(
            "nvfp4",
            "custom",
        ),
    ),
    refused("--fp4-quantizer-factory", str, None, NO_FP4),
)
