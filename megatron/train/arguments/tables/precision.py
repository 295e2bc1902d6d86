"""Flags: precision."""

from __future__ import annotations

from megatron.train.arguments.flag import Flag, Switch, no_op, refused, works

FP8 = "train/arguments/fp8.py"
FP8_TEST = "te/test_fp8.py"
NO_FP8_WEIGHTS = (
    "weights are gathered in the compute dtype and quantised by Transformer Engine in each forward: more bytes travel, "
    "nothing is lost"
)
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
        test="train/test_fp16.py",
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
    works(
        "--disable-bf16-reduced-precision-matmul",
        Switch.ON,
        False,
        "Partial sums of bf16 products are added in fp32.",
        "train/main.py",
        test="train/test_initialize.py",
    ),
    works(
        "--fp8-format",
        str,
        None,
        "Transformer Engine's layers compute in FP8; on GPUs, refused elsewhere. hybrid: E4M3 forward, E5M2 gradients.",
        FP8,
        test=FP8_TEST,
        choices=(
            "e4m3",
            "hybrid",
        ),
        dest="fp8",
    ),
    works(
        "--fp8-recipe",
        str,
        "delayed",
        "How FP8 scales are found: from past maxima, the tensor's maximum, or by blocks.",
        FP8,
        test=FP8_TEST,
        choices=(
            "tensorwise",
            "delayed",
            "mxfp8",
            "blockwise",
            "custom",
        ),
        refused_values=(("custom", "choose tensorwise, delayed, blockwise or mxfp8"),),
    ),
    no_op("--fp8-param-gather", Switch.ON, False, NO_FP8_WEIGHTS),
    works(
        "--fp8-margin",
        int,
        0,
        "Delayed recipe: scales leave this many powers of two of room.",
        FP8,
        test=FP8_TEST,
    ),
    no_op("--fp8-interval", int, 1, "Megatron ignores it as well"),
    works(
        "--fp8-amax-history-len",
        int,
        1,
        "Delayed recipe: steps whose maxima are remembered.",
        FP8,
        test=FP8_TEST,
    ),
    works(
        "--fp8-amax-compute-algo",
        str,
        "most_recent",
        "Delayed recipe: which of the remembered maxima counts.",
        FP8,
        test=FP8_TEST,
        choices=(
            "most_recent",
            "max",
        ),
    ),
    refused(
        "--no-fp8-wgrad",
        Switch.OFF,
        True,
        "Transformer Engine's recipes do not leave weight gradients out any more; use --first-last-layers-bf16",
        aliases=("--disable-fp8-wgrad",),
        dest="fp8_wgrad",
    ),
    refused(
        "--fp8-output-proj", Switch.ON, False, "the head computes in the parameters' dtype; leave it out"
    ),
    refused("--fp8-quantizer-factory", str, None, "recipes are chosen by --fp8-recipe"),
    works(
        "--first-last-layers-bf16",
        Switch.ON,
        False,
        "The first and the last layers compute in bf16, not in FP8.",
        FP8,
        test=FP8_TEST,
    ),
    works("--num-layers-at-start-in-bf16", int, 1, "How many first layers.", FP8, test=FP8_TEST),
    works("--num-layers-at-end-in-bf16", int, 1, "How many last layers.", FP8, test=FP8_TEST),
    no_op("--reuse-grad-buf-for-mxfp8-param-ag", Switch.ON, False, NO_FP8_WEIGHTS),
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
