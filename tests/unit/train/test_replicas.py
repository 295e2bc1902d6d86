"""Copies of weights that differ stop the run, with the parameter's name and the ranks."""

from __future__ import annotations

import torch

from megatron.train.grad_norm import local_tensor
from megatron.train.loop import _Loop
from tests.pool import run_ranks
from tests.unit.train.jobs import run_job

WORDS = "--train-iters 4 --eval-iters 0 --check-weight-hash-across-dp-replicas-interval 2"


def spoiled_run(rank: int, world: int) -> list[str | None]:
    """How runs end: good weights; one element changed on rank 1 after step 3; the same where each rank has its own."""
    ends = []
    report = _Loop._report
    for strategy, spoil in (("no_shard", False), ("no_shard", True), ("optim", False)):

        def change(self: _Loop, *arguments: object, spoil: bool = spoil) -> None:
            report(self, *arguments)  # type: ignore[arg-type]
            if spoil and rank == 1 and self.progress.iteration == 3:
                _, parameter = next(p for p in self.step.named_parameters if "linear_fc1.weight" in p[0])
                with torch.no_grad():
                    local_tensor(parameter).view(-1)[0] += 1.0

        _Loop._report = change  # type: ignore[method-assign]
        try:
            ends.append(
                run_job(rank, world, f"{WORDS} --data-parallel-sharding-strategy {strategy}".split()).error
            )
        finally:
            _Loop._report = report  # type: ignore[method-assign]
    return ends


def test_different_copies_stop_the_run() -> None:
    for good, bad, own in run_ranks(spoiled_run, 2, timeout=120):
        assert good is None and own is None
        assert (
            bad is not None and "ranks 0 and 1 hold different copies of" in bad and "linear_fc1.weight" in bad
        )
