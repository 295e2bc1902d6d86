"""Whole jobs through a pipeline: the numbers of one rank, checkpoints that other layouts continue, low precision."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.pool import run_ranks
from tests.unit.train.jobs import Outcome, run_jobs

# Without biases: the gradient of a key's bias is zero by mathematics and so, here and there, by chance. A zero more or
# less would be counted as the layout's.
COMMON = (
    "--seq-length 24 --max-position-embeddings 24 --hidden-dropout 0 --attention-dropout 0 "
    "--global-batch-size 8 --train-iters 4 --num-layers 3 --fp64 "
    "--eval-interval 2 --lr-warmup-iters 1 --disable-bias-linear --vocab-size 15"
)
PIPELINES = {
    "interleaved": "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
    "--account-for-embedding-in-pipeline-split",
    "zero-bubble": "--pipeline-model-parallel-size 2 --delay-wgrad-compute",
}


def run(world: int, *jobs: str) -> list[list[Outcome]]:
    """For each job the outcomes of all ranks."""
    by_rank = run_ranks(run_jobs, world, [job.split() for job in jobs], timeout=180)
    outcomes = [list(of_job) for of_job in zip(*by_rank, strict=True)]
    for of_job in outcomes:
        for outcome in of_job:
            assert outcome.error is None, outcome.error
    return outcomes


def assert_same_numbers(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert value == pytest.approx(other[name], rel=1e-6), (one["iteration"], name)


def weights(outcomes: list[Outcome]) -> dict[str, torch.Tensor]:
    return {name: value for outcome in outcomes for name, value in outcome.weights.items()}


@pytest.mark.parametrize("pipeline", ["interleaved", pytest.param("zero-bubble", marks=pytest.mark.full)])
def test_jobs_and_checkpoints_do_not_depend_on_the_pipeline(tmp_path: Path, pipeline: str) -> None:
    """K16, P10: reported numbers, zeros with a tied head; saved by one layout, continued by the other."""
    by_one, by_pipe = tmp_path / "one", tmp_path / "pipe"
    flags = f"{COMMON} {PIPELINES[pipeline]}"
    whole, _ = run(1, COMMON, f"{COMMON} --exit-interval 2 --save {by_one}")
    first, rest, other = run(
        2,
        f"{flags} --exit-interval 2 --save {by_pipe}",
        f"{flags} --load {by_pipe}",
        f"{flags} --load {by_one}",
    )
    (back,) = run(1, f"{COMMON} --load {by_pipe}")
    reference = whole[0].numbers
    assert {name for numbers in reference for name in numbers} >= {"lm_loss", "grad_norm", "params_norm"}
    assert_same_numbers(first[0].numbers + rest[0].numbers, reference)
    resumed = reference[len(first[0].numbers) :]
    for outcomes in (other, back):
        assert_same_numbers(outcomes[0].numbers, resumed)
    for outcomes in (rest, other, back):
        found = weights(outcomes)
        assert found.keys() == whole[0].weights.keys()
        for name, value in whole[0].weights.items():
            torch.testing.assert_close(found[name], value, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    ("ranks", "layout", "words"),
    [
        # Untied, the last stage holds loss and prediction only, and with it a copy of the embedding.
        (3, "Et|tt|mL", "--untie-embeddings-and-output-weights --mtp-num-layers 1"),
        # Prediction on a stage of its own: three stages hold the tied embedding.
        (4, "Et|tt|mm|L", "--mtp-num-layers 2 --delay-wgrad-compute"),
        # The first stage predicts as well, with its own embedding.
        (2, "Ettt,m|L", "--untie-embeddings-and-output-weights --mtp-num-layers 1 --mtp-detach-heads"),
    ],
    ids=["with-loss", "alone-tied", "with-embedding"],
)
def test_predictions_on_other_stages(ranks: int, layout: str, words: str, tmp_path: Path) -> None:
    """P07: the numbers of one rank, in evaluation too, and those of a run that goes on from a checkpoint."""
    common = (
        f"{COMMON} {words} --position-embedding-type rope --data-parallel-sharding-strategy optim "
        "--eval-interval 2 --eval-iters 1"
    )
    piped = f"{common} --pipeline-model-parallel-size {ranks} --pipeline-model-parallel-layout {layout}"
    (whole,) = run(1, common.replace("--delay-wgrad-compute", ""))
    four, two, rest = run(
        ranks, piped, f"{piped} --exit-interval 2 --save {tmp_path}", f"{piped} --load {tmp_path}"
    )
    assert {"lm_loss", "mtp_loss", "grad_norm"} <= whole[0].numbers[0].keys()
    assert_same_numbers(four[0].numbers, whole[0].numbers)
    assert_same_numbers(two[0].numbers + rest[0].numbers, whole[0].numbers)
    expected = whole[0].weights
    for outcomes in (four, rest):
        assert set().union(*(one.weights for one in outcomes)) == expected.keys()
        for one in outcomes:
            for name, weight in one.weights.items():
                torch.testing.assert_close(weight, expected[name], rtol=1e-7, atol=1e-9)
        copies = [w for one in outcomes for name, w in one.weights.items() if "word_embeddings" in name]
        assert all(torch.equal(copy, copies[0]) for copy in copies)


def test_low_precision() -> None:
    """Messages have the dtype of the hidden states."""
    common = f"{COMMON} --train-iters 2 --eval-interval 4".replace("--fp64", "--bf16")
    jobs = [common, f"{common} --fp32-residual-connection"]
    plain = run(1, *jobs)
    piped = run(2, *(f"{job} --pipeline-model-parallel-size 2" for job in jobs))
    for ours, theirs in zip(piped, plain, strict=True):
        assert ours[0].series("lm_loss") == pytest.approx(theirs[0].series("lm_loss"), rel=1e-2)
        assert ours[0].series("grad_norm") == pytest.approx(theirs[0].series("grad_norm"), rel=5e-2)
