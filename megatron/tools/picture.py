"""Pictures that the tools write."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def save_picture(figure: Any, flag: str, path: str | Path) -> None:
    """Write a matplotlib figure; its ending chooses the format.

    Raises ValueError, naming the flag that gave the path, where it cannot be written or its format is not known.
    """
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ValueError(
            f"{flag} {path}: {error.strerror}; give a path in a folder that can be written"
        ) from None
    except ValueError as error:
        if "is not supported" not in str(error):
            raise
        raise ValueError(f"{flag} {path}: {error}; end it in .png") from None
