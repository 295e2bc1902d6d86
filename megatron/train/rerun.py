"""Results of a step that cannot be right: finding them, and running the step again to see whether they come back.

Note "Twice". A fault that comes back with the same data, weights and random state is repeatable: it lies in the data,
the model, the settings, or a device that always errs. One that does not has passed: something happened to one rank,
whose second result differs from its first. Numbers of a step are sums over all ranks, so all ranks see a fault at once
and run the step again together. What a layer keeps beside its parameters (FP8 scales) is not put back.

Note "Spikes". Megatron's rule: a loss, or gradient norm, above ten times the largest one that was accepted in this
process is unexpected. It ends nothing: where it comes back it is what training does.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megatron.parallel.flight import all_gather_objects
from megatron.parallel.mesh import ParallelMesh
from megatron.train.grad_norm import local_tensor

SPIKE = 10.0
Named = Sequence[tuple[str, Tensor]]
Mode = Literal["disabled", "validate_results", "report_stats"]


@dataclass(frozen=True)
class RerunOptions:
    """mode: run a faulty step again, every step, or none. spiky_loss, large_grads: note "Spikes". injection_rate: one
    step in so many gets a wrong loss on a rank (0: none), in its first run or, `persistent`, in both; for tests.
    tracker: file that gets a JSON line for each fault.
    """

    mode: Mode = "disabled"
    spiky_loss: bool = False
    large_grads: bool = False
    injection_rate: int = 0
    persistent: bool = False
    tracker: str | None = None


@dataclass(frozen=True)
class Verdict:
    """What a first run of a step looks like. fatal: the update must not be made with it."""

    text: str
    fatal: bool


@dataclass(frozen=True)
class Numbers:
    """A step's numbers, summed over the world. squares: of the gradients. stop: ranks that want to end the run."""

    squares: float
    zeros: float
    loss: float
    tokens: float
    stop: float
    auxiliary: Tensor


@dataclass(frozen=True)
class Attempt:
    """One run of forward and backward. losses: [num_microbatches] of this rank. inverse: factor of the gradients."""

    losses: Tensor
    numbers: Numbers
    inverse: float
    norm: float
    overflow: bool


class Window:
    """The microbatches of a step, kept as they are drawn, so that they can be given again."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._kept: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        yield from list(self._kept)
        for batch in self._batches:
            self._kept.append(batch)
            yield batch


class RandomState:
    """This rank's random state when made; `restore` brings it back."""

    def __init__(self, device: torch.device, streams: Any) -> None:
        self._python = random.getstate()
        self._torch = torch.get_rng_state()
        self._device, self._streams = device, streams
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._named = None if streams is None else streams.state()

    def restore(self) -> None:
        """Put it back."""
        random.setstate(self._python)
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)
        if self._named is not None:
            self._streams.load_state(self._named)


@dataclass
class Guard:
    """Looks at results, remembers what is usual, and counts faults. The same on all ranks, but for `rank`."""

    options: RerunOptions
    rank: int = 0
    largest_loss: float = 0.0
    largest_norm: float = 0.0
    _draw: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._draw = random.Random(f"injected faults of rank {self.rank}")

    def look(self, loss: float, norm: float) -> Verdict | None:
        """What is wrong with a step's loss and gradient norm; None: nothing."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return Verdict(f"the loss is {loss} and the gradient norm {norm}", True)
        if self.options.spiky_loss and self.largest_loss and loss > SPIKE * self.largest_loss:
            return Verdict(f"the loss of {loss:g} is above {SPIKE:g} times the largest before", False)
        if self.options.large_grads and self.largest_norm and norm > SPIKE * self.largest_norm:
            return Verdict(
                f"the gradient norm of {norm:g} is above {SPIKE:g} times the largest before", False
            )
        return None

    def accept(self, loss: float, norm: float) -> None:
        """Remember a step that was taken."""
        if math.isfinite(loss) and math.isfinite(norm):
            self.largest_loss = max(self.largest_loss, loss)
            self.largest_norm = max(self.largest_norm, norm)

    def injects(self) -> bool:
        """Whether this step is one that gets a fault on this rank."""
        rate = self.options.injection_rate
        return rate > 0 and self._draw.random() < 1.0 / rate

    @property
    def reruns(self) -> bool:
        """Whether a step may have to be run again."""
        return self.options.mode != "disabled"

    def judge(
        self, first: Attempt, run_again: Callable[[], Attempt], named_parameters: Named, mesh: ParallelMesh
    ) -> tuple[Attempt, list[str]]:
        """Run a step again where its numbers cannot be right (note "Twice"). Collective.

        Returns: (the run that counts, lines for the log).
        """
        verdict = self.look(first.numbers.loss, first.norm)
        if verdict is None and self.options.mode != "report_stats":
            return first, []
        place = ""
        if verdict is not None:
            place = (where_not_finite if verdict.fatal else where_largest)(
                first.losses, named_parameters, mesh
            )
        second = run_again()
        ranks = differing_ranks(first.losses, second.losses, mesh)
        if verdict is None:
            gap = abs(second.numbers.loss - first.numbers.loss)
            where = f", on ranks {ranks}" if ranks else ""
            return second, [f"rerun: loss {first.numbers.loss:.9g}, a second run differs by {gap:.3g}{where}"]
        passed = self.look(second.numbers.loss, second.norm) is None
        self.track({"fault": verdict.text, "place": place, "passed": passed, "ranks_that_differ": ranks})
        kind = (
            f"passing: a second run of the step gave a loss of {second.numbers.loss:g}; results differ on ranks "
            f"{ranks}, suspect their devices"
            if passed
            else "repeatable: a second run of the step gave it again"
        )
        return second, [f"fault: {verdict.text}; {place}. It is {kind}"]

    def track(self, found: Mapping[str, Any]) -> None:
        """Append a fault to the tracker's file; rank 0 only."""
        if self.options.tracker and self.rank == 0:
            path = Path(self.options.tracker)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"time": time.time(), **found}) + "\n")


def differing_ranks(first: Tensor, second: Tensor, mesh: ParallelMesh) -> list[int]:
    """Ranks whose own losses of the two runs are not the same bits. Collective.

    first, second: [num_microbatches], fp64.
    """
    same = torch.equal(first.view(torch.int64), second.view(torch.int64))
    answers = all_gather_objects(same, mesh.group("world"), "whether a step came out the same twice")
    return [rank for rank, equal in enumerate(answers) if not equal]


def where_not_finite(losses: Tensor, named_parameters: Named, mesh: ParallelMesh) -> str:
    """Where the first numbers are that are no numbers: rank, microbatch, parameter. Collective; "" for nowhere.

    losses: [num_microbatches] of this rank.
    """
    bad = [index for index, good in enumerate(torch.isfinite(losses).tolist()) if not good]
    names = [name for name, parameter in named_parameters if not _is_finite(parameter.grad)]
    findings = all_gather_objects((bad, names), mesh.group("world"), "where numbers are not finite")
    parts = []
    wrong = [(rank, microbatches) for rank, (microbatches, _) in enumerate(findings) if microbatches]
    if wrong:
        rank, microbatches = wrong[0]
        parts.append(f"the loss first goes wrong on rank {rank}, microbatch {microbatches[0]}")
    found = sorted({name for _, names in findings for name in names})
    if found:
        rank = next(index for index, (_, names) in enumerate(findings) if found[0] in names)
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        parts.append(f"the gradient of {found[0]} (rank {rank}){more} is not finite")
    return "; ".join(parts)


def where_largest(losses: Tensor, named_parameters: Named, mesh: ParallelMesh) -> str:
    """Rank and microbatch of the largest loss, parameter of the largest gradient. Collective."""
    norms = [
        (float(local_tensor(parameter.grad).norm()), name)
        for name, parameter in named_parameters
        if parameter.grad is not None and local_tensor(parameter.grad).numel()
    ]
    own = (float(losses.max()), int(losses.argmax()), max(norms, default=(0.0, "")))
    findings = all_gather_objects(own, mesh.group("world"), "where numbers are largest")
    loss, rank = max((found[0], rank) for rank, found in enumerate(findings))
    (norm, name), holder = max((found[2], rank) for rank, found in enumerate(findings))
    return (
        f"the largest loss is {loss:g}, on rank {rank}, microbatch {findings[rank][1]}; the largest gradient that of "
        f"{name} (norm {norm:g} on rank {holder})"
    )


def _is_finite(gradient: Tensor | None) -> bool:
    return gradient is None or bool(torch.isfinite(local_tensor(gradient)).all())
