"""Where numbers go beside the terminal: a JSONL file, tensorboard, wandb.

Note "Resumes". A resumed run starts at its checkpoint's iteration, which may be before the last one written. In a
metrics file later lines count. tensorboard is told to forget what follows the first new point. wandb's own step only
ever grows, so the iteration is a number of its own there, on the axis; a run keeps its id in the folder of its
checkpoints (else of wandb), so that a resume goes on in the same run.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TextIO


class Sink(Protocol):
    """Somewhere that takes named numbers."""

    def write(self, iteration: int, values: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class JsonLines:
    """One JSON object a line, appended and flushed, so that a crashed run keeps its numbers.

    A resumed run appends; lines of iterations that it repeats come last and count.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file: TextIO = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise ValueError(
                f"--metrics-file {path}: {error.strerror}; give a file that can be written"
            ) from error

    def write(self, iteration: int, values: Mapping[str, float]) -> None:
        """Append one line."""
        self._file.write(json.dumps({"iteration": iteration, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """A tensorboard event file; scalars carry Megatron's names. Made at the first point (note "Resumes")."""

    def __init__(self, directory: str, queue_size: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(
                "--tensorboard-dir needs the package tensorboard; pip install tensorboard, or drop the flag"
            ) from error
        self._make: Callable[[int], Any] = lambda first: SummaryWriter(
            log_dir=directory, max_queue=queue_size, purge_step=first
        )
        self._writer: Any = None

    def write(self, iteration: int, values: Mapping[str, float]) -> None:
        """Add one point to each series."""
        if self._writer is None:
            self._writer = self._make(iteration)
        for name, value in values.items():
            self._writer.add_scalar(name.replace("_", " "), value, iteration)

    def close(self) -> None:
        """Flush and close."""
        if self._writer is not None:
            self._writer.close()


@dataclass(frozen=True)
class WandbOptions:
    """--wandb-project and its like; mode None leaves the choice to wandb's own settings. identity: folder where the
    run's id is kept (note "Resumes"); None keeps none.
    """

    project: str
    name: str | None = None
    entity: str | None = None
    directory: str | None = None
    mode: Literal["online", "offline", "disabled", "shared"] | None = None
    identity: str | None = None


class WeightsAndBiases:
    """A wandb run; offline where there is no key or WANDB_MODE says so (wandb decides)."""

    def __init__(self, options: WandbOptions, config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ValueError(
                "--wandb-project needs the package wandb; pip install wandb, or drop the flag"
            ) from error
        self.run_id = _run_id(options.identity)
        self._run = wandb.init(
            project=options.project,
            name=options.name,
            entity=options.entity,
            dir=options.directory,
            config=dict(config),
            mode=options.mode,
            id=self.run_id,
            resume=None if self.run_id is None or options.mode == "offline" else "allow",
        )
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")

    def write(self, iteration: int, values: Mapping[str, float]) -> None:
        """Log one point."""
        self._run.log({"iteration": iteration, **values})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def _run_id(folder: str | None) -> str | None:
    if folder is None:
        return None
    path = Path(folder) / "wandb_run_id.txt"
    if path.exists():
        return path.read_text(encoding="utf-8").strip()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(identity := uuid.uuid4().hex[:12], encoding="utf-8")
    return identity


class Without:
    """A sink that does not get some of the numbers.

    hidden: beginnings of the names that are left out.
    """

    def __init__(self, sink: Sink, hidden: tuple[str, ...]) -> None:
        self._sink, self._hidden = sink, hidden

    def write(self, iteration: int, values: Mapping[str, float]) -> None:
        """Pass on what is not hidden."""
        self._sink.write(
            iteration, {name: value for name, value in values.items() if not name.startswith(self._hidden)}
        )

    def close(self) -> None:
        """Close it."""
        self._sink.close()
