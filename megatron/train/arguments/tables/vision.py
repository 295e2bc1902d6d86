"""Flags: vision."""

from __future__ import annotations

from megatron.train.arguments.flag import Flag, Switch, refused

VISION = "text models only"

TITLE = "Vision"

FLAGS: tuple[Flag, ...] = (
    refused("--classes-fraction", float, 1.0, VISION),
    refused("--data-per-class-fraction", float, 1.0, VISION),
    refused("--dino-bottleneck-size", int, 256, VISION),
    refused("--dino-freeze-last-layer", float, 1, VISION),
    refused("--dino-head-hidden-size", int, 2048, VISION),
    refused("--dino-local-crops-number", int, 10, VISION),
    refused("--dino-local-img-size", int, 96, VISION),
    refused("--dino-norm-last-layer", Switch.ON, False, VISION),
    refused("--dino-teacher-temp", float, 0.07, VISION),
    refused("--dino-warmup-teacher-temp", float, 0.04, VISION),
    refused("--dino-warmup-teacher-temp-epochs", int, 30, VISION),
    refused("--img-h", int, 224, VISION),
    refused("--img-w", int, 224, VISION),
    refused("--iter-per-epoch", int, 1250, VISION),
    refused("--mask-factor", float, 1.0, VISION),
    refused(
        "--mask-type",
        str,
        "random",
        VISION,
        choices=(
            "random",
            "row",
        ),
    ),
    refused("--num-channels", int, 3, VISION),
    refused("--num-classes", int, 1000, VISION),
    refused("--patch-dim", int, 16, VISION),
    refused(
        "--swin-backbone-type",
        str,
        "tiny",
        VISION,
        choices=(
            "tiny",
            "base",
            "h3",
        ),
    ),
    refused(
        "--vision-backbone-type",
        str,
        "vit",
        VISION,
        choices=(
            "vit",
            "mit",
            "swin",
        ),
    ),
    refused("--vision-pretraining", Switch.ON, False, VISION),
    refused(
        "--vision-pretraining-type",
        str,
        "classify",
        VISION,
        choices=(
            "classify",
            "inpaint",
            "dino",
        ),
    ),
)
