"""--fsdp-order-check-interval: a rank whose launches came in another order ends a job with a name."""

from __future__ import annotations

import pytest

from megatron.fsdp import order
from tests.pool import run_ranks
from tests.unit.train.jobs import run_jobs

JOB = (
    "--global-batch-size 4 --train-iters 4 --eval-iters 0 --hidden-dropout 0 --attention-dropout 0 "
    "--data-parallel-sharding-strategy optim_grads_params"
)
LAYOUTS = (
    "--pipeline-model-parallel-size 2",
    "--tensor-model-parallel-size 2 --sequence-parallel",
    "--micro-batch-size 1 --num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
    "--disable-bias-linear",
)


def compared(rank: int, world: int, jobs: list[list[str]]) -> tuple[list[str | None], list[int]]:
    """The jobs' errors, and after how many steps something was compared."""
    steps = []
    check = order.OrderCheck.end_step

    def counted(self: order.OrderCheck) -> None:
        check(self)
        if not self._launches:
            steps.append(self._steps)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order.OrderCheck, "end_step", counted)
        return [outcome.error for outcome in run_jobs(rank, world, jobs)], steps


def test_jobs_compare_their_order() -> None:
    """Every second step; not at all within the default's 100; in every layout without a false alarm."""
    jobs = [f"{JOB} --fsdp-order-check-interval 2", JOB]
    for errors, steps in run_ranks(compared, 2, [words.split() for words in jobs]):
        assert errors == [None, None] and steps == [2, 4]
    every = [f"{JOB} {layout} --fsdp-order-check-interval 1".split() for layout in LAYOUTS]
    for errors, steps in run_ranks(compared, 4, every):
        assert errors == [None] * len(LAYOUTS) and len(steps) == 4 * len(LAYOUTS)


def swapped(rank: int, world: int, words: list[str]) -> str | None:
    """Rank 1 notes two launches the other way round, as one that runs two equal layers in another order would."""
    launched = order.OrderCheck.launched
    held: list[tuple[str, str]] = []

    def noted(self: order.OrderCheck, event: str, name: str) -> None:
        if rank == 1 and event == "gather" and name.endswith("layers.0") and not held:
            held.append((event, name))
            return
        launched(self, event, name)
        if len(held) == 1 and event == "gather":
            launched(self, *held[0])
            held.append(held[0])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order.OrderCheck, "launched", noted)
        return run_jobs(rank, world, [words])[0].error


def test_another_order_ends_the_job() -> None:
    errors = run_ranks(swapped, 2, f"{JOB} --fsdp-order-check-interval 2".split())
    for error in errors:
        assert error is not None and "rank 1 launched the gather of" in error and "layers.0" in error
