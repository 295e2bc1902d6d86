"""FP8 through Transformer Engine's autocast: recipes, and what is refused where.

Note "Two contexts". TE rolls the history of maxima of the delayed recipe, for all layers that ever computed under it,
each time the outermost context ends: one context must span a whole forward of the model, and layers that shall
compute otherwise switch FP8 off inside it. Other recipes keep nothing, and each layer enters its own context.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.distributed import ProcessGroup

from megatron.models.backends.transformer_engine.settings import EngineSettings, Fp8Settings

RECIPE_CLASSES = {
    "delayed": "DelayedScaling",
    "tensorwise": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
}
ROW_MULTIPLES = {"delayed": 16, "tensorwise": 16, "blockwise": 16, "mxfp8": 32}
"""What TE's grouped GEMMs in FP8 want the rows of each expert to be a multiple of."""

AVAILABILITY = {
    "delayed": "is_fp8_available",
    "tensorwise": "is_fp8_available",
    "blockwise": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
}
"""Function of transformer_engine.pytorch that says whether the device can do a recipe."""


def make_recipe(te: Any, settings: Fp8Settings | None) -> Any | None:
    """TE's recipe object; None without FP8.

    Raises ValueError where there is no CUDA device, or it or the installed TE cannot do the recipe.
    """
    if settings is None:
        return None
    recipe = settings.recipe
    if not _on_cuda():
        raise ValueError(
            f"--fp8-format {settings.format}: FP8 needs a CUDA device and there is none; leave it out"
        )
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


def _on_cuda() -> bool:
    return torch.cuda.is_available()


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


def fp8_autocast(te: Any, recipe: Any | None, group: ProcessGroup | None) -> AbstractContextManager[None]:
    """TE's context for compute in FP8; `group`: ranks that share maxima. recipe None: compute without FP8."""
    enabled = recipe is not None
    if hasattr(te, "autocast"):
        return te.autocast(enabled=enabled, recipe=recipe, amax_reduction_group=group)
    return te.fp8_autocast(enabled=enabled, fp8_recipe=recipe, fp8_group=group)


class QuantisedCompute:
    """The part of the backend that says which layer computes in FP8 (note "Two contexts")."""

    settings: EngineSettings
    _te: Any
    _recipe: Any | None
    _amax_group: ProcessGroup | None

    def autocast(self, recipe: str | None) -> AbstractContextManager[None]:
        """FP8 compute in `recipe` (that of `settings.fp8`), or none in a run that has FP8 elsewhere."""
        if recipe is None:
            return nullcontext() if self._recipe is None else fp8_autocast(self._te, None, None)
        if self.settings.fp8 is None or recipe != self.settings.fp8.recipe:
            raise ValueError(f"--fp8-recipe {recipe}: this backend was built without it (EngineSettings.fp8)")
        return fp8_autocast(self._te, self._recipe, self._amax_group)

    def model_autocast(self) -> AbstractContextManager[None]:
        """FP8 around a whole forward for the delayed recipe, else nothing."""
        settings = self.settings.fp8
        return self.autocast("delayed") if settings and settings.recipe == "delayed" else nullcontext()

    def layer_recipe(self, layer_index: int, num_layers: int) -> str | None:
        """See Backend.layer_recipe."""
        settings = self.settings.fp8
        return None if settings is None else settings.recipe_of_layer(layer_index, num_layers)

    def row_multiple(self, recipe: str | None) -> int:
        """See Backend.row_multiple."""
        return 1 if recipe is None else ROW_MULTIPLES[recipe]
