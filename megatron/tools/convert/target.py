"""A folder that is there whole or not at all, and never in place of another."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def new_folder(target: Path, flag: str = "--save") -> Iterator[Path]:
    """An empty folder beside `target` that becomes `target` at the end of the block; an error leaves nothing.

    Raises ValueError naming the flag if `target` is there, or its parent cannot be written.
    """
    refuse_existing(target, flag)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f"{target.name}.partial-", dir=target.parent))
    except OSError as error:
        raise ValueError(f"{flag} {target}: {target.parent} cannot be written ({error.strerror})") from None
    try:
        yield partial
        refuse_existing(target, flag)  # a second conversion may have been faster
        partial.chmod(0o755)
        partial.rename(target)
    except OSError as error:
        raise ValueError(f"{flag} {target} cannot be written ({error.strerror or error})") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def refuse_existing(target: Path, flag: str = "--save") -> None:
    """Raise ValueError if `target` exists; an empty folder does not count."""
    if target.is_dir() and not any(target.iterdir()):
        return
    if target.exists() or target.is_symlink():
        raise ValueError(f"{flag} {target} exists: give a new folder, nothing is overwritten")
