"""Flags: distillation and export."""

from __future__ import annotations

from megatron.train.arguments.flag import Flag, Switch, refused

DISTILLATION = "distillation and export are left to ModelOpt and megatron-core"

TITLE = "Distillation and export"

FLAGS: tuple[Flag, ...] = (
    refused("--logits-load-decode-threads", int, 4, DISTILLATION),
    refused("--logits-load-dir", str, None, DISTILLATION),
    refused("--logits-load-ignore-errors", Switch.ON, False, DISTILLATION),
    refused("--logits-load-kd-loss-alpha", float, 1.0, DISTILLATION),
    refused("--logits-load-msc-prefetch-depth", int, 2, DISTILLATION),
    refused("--logits-load-prefetch-factor", int, 3, DISTILLATION),
    refused("--logits-save-dir", str, None, DISTILLATION),
    refused(
        "--logits-save-dtype",
        str,
        "fp16",
        DISTILLATION,
        choices=(
            "fp16",
            "bf16",
            "fp32",
        ),
    ),
    refused("--logits-save-top-k", int, None, DISTILLATION),
    refused("--logits-save-top-p", float, None, DISTILLATION),
    refused("--logits-save-top-p-min-k", int, 1, DISTILLATION),
    refused("--export-kd-cfg", str, None, DISTILLATION),
    refused("--export-kd-teacher-load", str, None, DISTILLATION),
    refused("--export-te-mcore-model", Switch.ON, False, DISTILLATION),
    refused("--export-force-local-attention", Switch.ON, False, DISTILLATION),
)
