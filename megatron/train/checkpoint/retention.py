"""Which checkpoints stay when a new one is complete."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from megatron.train.checkpoint.files import OLD, PARTIAL, directory_of, iterations_in


@dataclass(frozen=True)
class Retention:
    """What becomes of checkpoints older than the newest.

    interval: those at multiples of it stay (--save-retain-interval); None: all stay. only_newest: none stays, also of
    an abandoned future of the run.
    """

    interval: int | None = None
    only_newest: bool = False

    def keeps(self, iteration: int) -> bool:
        """Whether the checkpoint of `iteration` stays though there is a newer one."""
        return not self.only_newest and (not self.interval or iteration % self.interval == 0)


def delete_old(root: Path, newest: int, retention: Retention) -> None:
    """Delete what `retention` does not keep, and what crashes left of unfinished saves.

    Call it when `newest` is complete and the marker names it: it is the one that is never deleted. Later iterations
    are of another future of the run and stay, but for `only_newest`.
    What is being deleted no longer has a checkpoint's name.
    """
    for leftover in root.glob(f"iter_*{PARTIAL}"):
        shutil.rmtree(leftover, ignore_errors=True)
    for iteration in iterations_in(root):
        in_question = iteration < newest or (retention.only_newest and iteration > newest)
        if in_question and not retention.keeps(iteration):
            directory = directory_of(root, iteration)
            shutil.rmtree(directory.with_name(directory.name + OLD), ignore_errors=True)
            doomed = directory.with_name(directory.name + PARTIAL)
            if directory.is_dir():
                directory.rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)
