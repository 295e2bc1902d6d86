"""fp16 with its loss scale, and Muon, under ZeRO-3 over two ranks: whole runs."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch

from tests.pool import run_ranks
from tests.unit.train.jobs import Outcome, run_jobs

SHARDED = "--data-parallel-sharding-strategy optim_grads_params"
WHOLE = "--data-parallel-sharding-strategy no_shard"


def outcomes(jobs: list[str]) -> list[list[Outcome]]:
    """By job, then by rank."""
    by_rank = run_ranks(run_jobs, 2, [job.split() for job in jobs], timeout=400)
    done = [[rank[index] for rank in by_rank] for index in range(len(jobs))]
    for job in done:
        assert not any(outcome.error for outcome in job), job[0].error
    return done


def test_fp16_runs(tmp_path: Path) -> None:
    """A static scale trains as fp32 does. A dynamic one that starts too high: overflowing steps change nothing on any
    rank and halve it, clean ones double it; a resumed run goes on with it.
    """
    dynamic = (
        f"{SHARDED} --fp16 --initial-loss-scale 2097152 --hysteresis 1 --loss-scale-window 2 --eval-iters 0 "
        f"--lr-decay-iters 12 --save {tmp_path}"
    )
    static, exact, first, resumed, straight = outcomes(
        [
            f"{SHARDED} --fp16 --loss-scale 256 --train-iters 4 --eval-iters 0",
            f"{SHARDED} --train-iters 4 --eval-iters 0",
            f"{dynamic} --train-iters 12 --exit-interval 6",
            f"{dynamic} --train-iters 12 --load {tmp_path}",
            f"{dynamic}x --train-iters 12",
        ]
    )
    assert static[0].series("loss_scale") == [256.0] * 4
    assert static[0].series("lm_loss") == pytest.approx(exact[0].series("lm_loss"), rel=5e-3)
    assert any(torch.equal(a, a.half().float()) is False for a in static[0].weights.values()), (
        "fp32 main weights"
    )

    scales, norms = straight[0].series("loss_scale"), straight[0].series("params_norm")
    overflows = [not math.isfinite(norm) for norm in straight[0].series("grad_norm")]
    assert overflows[0] and not all(overflows)  # a doubled scale may be too high again
    for step, overflow in enumerate(overflows[:-1]):
        assert scales[step + 1] in ((scales[step] / 2,) if overflow else (scales[step], scales[step] * 2))
        assert (norms[step + 1] != norms[step]) is not overflows[step + 1]
    assert any(later > before for before, later in itertools.pairwise(scales))
    for job in (static, straight):
        assert job[0].series("loss_scale") == job[1].series("loss_scale")
        assert all(torch.equal(job[0].weights[name], job[1].weights[name]) for name in job[0].weights)
    both = first[0].series("loss_scale") + resumed[0].series("loss_scale")
    assert both == scales
    assert all(
        torch.equal(resumed[0].weights[name], straight[0].weights[name]) for name in straight[0].weights
    )


def test_muon_and_narrow_states_do_not_depend_on_sharding(tmp_path: Path) -> None:
    """Each matrix whole on one rank gives what every rank with every matrix gives; so do averages in 16 bits, which a
    checkpoint keeps.
    """
    muon = (
        "--optimizer dist_muon --muon-nesterov --train-iters 3 --eval-iters 0 --lr-decay-iters 3 --global-batch-size 4 "
        "--hidden-dropout 0 --attention-dropout 0"
    )
    narrow = (
        "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype fp16 --train-iters 4 --eval-iters 0 "
        "--lr-decay-iters 4"
    )
    results = outcomes(
        [
            f"{WHOLE} {muon}",
            f"{SHARDED} {muon}",
            f"{SHARDED} --tensor-model-parallel-size 2 {muon}",
            f"{WHOLE} {narrow}",
            f"{SHARDED} {narrow} --save {tmp_path} --exit-interval 2",
            f"{SHARDED} {narrow} --load {tmp_path}",
        ]
    )
    losses = [job[0].series("lm_loss") for job in results]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=1e-4)
    assert losses[0][-1] < losses[0][0]
    assert losses[4] + losses[5] == pytest.approx(losses[3], rel=1e-5)
