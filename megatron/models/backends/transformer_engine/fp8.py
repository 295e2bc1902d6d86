"""FP8 through Transformer Engine's autocast: recipes, and what is refused where."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.distributed import ProcessGroup

from megatron.models.backends.transformer_engine.settings import FP8_RECIPES, Fp8Settings

RECIPE_CLASSES = {
    "delayed": "DelayedScaling",
    "tensorwise": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
}
AVAILABILITY = {
    "delayed": "is_fp8_available",
    "tensorwise": "is_fp8_available",
    "blockwise": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
}
"""Function of transformer_engine.pytorch that says whether the device can do a recipe."""


def refuse_on_cpu(flag: str, value: object) -> None:
    """Raise ValueError where there is no CUDA device to compute in FP8."""
    if not torch.cuda.is_available():
        raise ValueError(f"{flag} {value}: FP8 needs a CUDA device and there is none; leave --fp8-format out")


def make_recipe(te: Any, recipe: str, settings: Fp8Settings) -> Any:
    """TE's recipe object.

    Raises ValueError where the recipe is unknown, or the installed TE or the device cannot do it.
    """
    if recipe not in FP8_RECIPES:
        raise ValueError(f"--fp8-recipe {recipe!r}: choose from {', '.join(FP8_RECIPES)}")
    import transformer_engine.common.recipe as recipes

    kind = getattr(recipes, RECIPE_CLASSES[recipe], None)
    if kind is None:
        raise ValueError(
            f"--fp8-recipe {recipe}: the installed Transformer Engine has no {RECIPE_CLASSES[recipe]}"
        )
    _check_device(te, recipe)
    options: dict[str, Any] = {"fp8_format": recipes.Format[settings.format.upper()]}
    if recipe == "delayed":
        options["margin"] = settings.margin
        options["amax_history_len"] = settings.amax_history_len
        options["amax_compute_algo"] = settings.amax_compute_algo
    return kind(**options)


def _check_device(te: Any, recipe: str) -> None:
    available = getattr(te, AVAILABILITY[recipe], None)
    if available is None:  # older TE says so itself on entering autocast
        return
    possible = available(return_reason=True) if _takes_reason(available) else (available(), "")
    if isinstance(possible, tuple) and not possible[0]:
        raise ValueError(f"--fp8-recipe {recipe}: this device cannot do it ({possible[1]})")


def _takes_reason(function: Any) -> bool:
    import inspect

    return "return_reason" in inspect.signature(function).parameters


def fp8_autocast(te: Any, recipe: Any, group: ProcessGroup | None) -> AbstractContextManager[None]:
    """TE's context for compute in FP8; `group`: ranks that share maxima."""
    if hasattr(te, "autocast"):
        return te.autocast(enabled=True, recipe=recipe, amax_reduction_group=group)
    return te.fp8_autocast(enabled=True, fp8_recipe=recipe, fp8_group=group)


def quantized_init(te: Any, recipe: Any) -> AbstractContextManager[None]:
    """TE's context in which layers are built with FP8 weights."""
    if hasattr(te, "quantized_model_init"):
        return te.quantized_model_init(enabled=True, recipe=recipe)
    return te.fp8_model_init(enabled=True, recipe=recipe)
