"""Which checkpoint a tool takes: the one that was asked for, or the newest whole one; every byte of it is checked."""

from __future__ import annotations

import sys
from pathlib import Path

from megatron.train.checkpoint import (
    MARKER,
    RUN_FILE,
    ChoiceOptions,
    Ranks,
    choose_checkpoint,
    directory_of,
)


def whole_checkpoint(load: str, step: int | None) -> tuple[Path, int]:
    """The --save folder of a run and the iteration to load from it; standard error tells what was passed over.

    Args:
        load: the --save folder of a run, or one iter_* folder in it.
        step: --ckpt-step: this one or none.

    Raises ValueError naming file and cause: there is none, or none is whole.
    """
    root = Path(load)
    number = root.name.removeprefix("iter_")
    if number.isdigit() and root == directory_of(root.parent, int(number)) and (root / RUN_FILE).exists():
        if step not in (None, int(number)):
            raise ValueError(f"--ckpt-step {step} is not the iteration of --load {load}; leave it out")
        root, step = root.parent, int(number)
    found = choose_checkpoint(str(root), Ranks(), ChoiceOptions(step, contents=True))
    if found is None:
        raise ValueError(f"--load {load} holds no {MARKER}; give the --save folder of a run")
    for warning in found.warnings:
        print(f"warning: {warning}; iteration {found.iteration} is taken", file=sys.stderr)
    return root, found.iteration
