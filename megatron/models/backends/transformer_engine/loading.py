"""Import Transformer Engine late, and say what is missing in words that help."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any


def load_engine() -> Any:
    """transformer_engine.pytorch.

    Raises ValueError where it cannot be imported, with the reason and the way without it.
    """
    try:
        return importlib.import_module("transformer_engine.pytorch")
    except (ImportError, RuntimeError, OSError, StopIteration) as error:
        # RuntimeError: an "empty meta package" without the extension. OSError, StopIteration: its shared
        # objects.
        raise ValueError(
            f"--transformer-impl transformer_engine: Transformer Engine cannot be imported ({error}); "
            "install transformer_engine[pytorch] for this CUDA version or use --transformer-impl local"
        ) from error


def engine_version() -> tuple[int, ...]:
    """(major, minor) of the installed Transformer Engine, e.g. (2, 20)."""
    return tuple(int(part) for part in importlib.metadata.version("transformer_engine").split(".")[:2])
