"""--fsdp-double-buffer: units take turns on two sets of buffers, and not a bit of the run changes."""

from __future__ import annotations

import pytest
import torch

from megatron.fsdp import wrapper
from tests.pool import run_ranks
from tests.unit.train.jobs import Outcome, run_jobs

JOB = "--global-batch-size 4 --train-iters 2 --eval-iters 0 --data-parallel-sharding-strategy optim_grads_params"
LAYOUTS = {
    "plain": "--num-layers 3",
    "recompute": "--num-layers 4 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "two microbatches": "--micro-batch-size 1",
    "interleaved": "--num-layers 8 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
    "--micro-batch-size 1",
    "experts": "--micro-batch-size 1 --num-experts 4 --expert-model-parallel-size 2 --mtp-num-layers 1 "
    "--position-embedding-type rope --moe-token-dispatcher-type alltoall --disable-bias-linear",
}


def both(rank: int, world: int, words: list[str]) -> tuple[list[Outcome], list[int]]:
    """The job without and with the flag, and how many buffers each FSDP made."""
    made = []
    make_pool = wrapper.make_pool

    def counted(*args: object) -> object:
        slots = make_pool(*args)  # type: ignore[arg-type]
        made.append(len(slots))
        return slots

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wrapper, "make_pool", counted)
        return run_jobs(rank, world, [words, [*words, "--fsdp-double-buffer"]]), made


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_sets_of_buffers_change_nothing(layout: str) -> None:
    world = 4 if layout == "interleaved" else 2
    for (plain, pooled), made in run_ranks(both, world, f"{JOB} {LAYOUTS[layout]}".split()):
        assert plain.error is None and pooled.error is None, (plain.error, pooled.error)
        assert made and all(count > 0 for count in made)
        assert pooled.series("lm_loss") and pooled.numbers == plain.numbers
        for name, weight in plain.weights.items():
            assert torch.equal(pooled.weights[name], weight), name
