"""Flags: spellings that Megatron itself has dropped."""

from __future__ import annotations

from megatron.train.arguments.flag import Flag, Switch, no_op, refused
from megatron.train.arguments.values import boolean

TITLE = "Spellings that Megatron itself has dropped"

FLAGS: tuple[Flag, ...] = (
    refused("--batch-size", int, None, "no longer Megatron's; use --micro-batch-size"),
    refused("--model-parallel-size", int, None, "no longer Megatron's; use --tensor-model-parallel-size"),
    refused(
        "--checkpoint-activations", Switch.ON, False, "no longer Megatron's; use --recompute-activations"
    ),
    no_op(
        "--use-dist-ckpt", Switch.ON, False, "there is one checkpoint format", dest="use_dist_ckpt_deprecated"
    ),
    no_op(
        "--dist-ckpt-format", str, None, "there is one checkpoint format", dest="dist_ckpt_format_deprecated"
    ),
    refused("--onnx-safe", boolean, None, "export is not there"),
)
