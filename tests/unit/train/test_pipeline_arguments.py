"""From the command line to a pipeline's plan, and what is refused before any process group exists."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron.train.arguments import parse_args, validate
from megatron.train.config import TrainConfig
from megatron.train.pipeline import pipeline_plan

MODEL = "--num-layers 8 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8"
RUN = "--micro-batch-size 1 --global-batch-size 8 --train-iters 2 --lr 0.1 --mock-data --tokenizer-type NullTokenizer"


def validated(words: str, world: int = 4, device: str = "cpu") -> TrainConfig:
    return validate(
        parse_args([*MODEL.split(), *RUN.split(), "--vocab-size", "32", *words.split()]), world, device
    )


def layers(words: str, world: int = 4) -> list[int]:
    return [len(stage.layers) for stage in pipeline_plan(validated(words, world)).stages]


@pytest.mark.parametrize(
    ("words", "counts"),
    [
        ("--pipeline-model-parallel-size 4", [2, 2, 2, 2]),
        ("--pipeline-model-parallel-size 4 --num-layers 6", [1, 2, 2, 1]),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2", [2, 2, 2, 2]),
        ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 4", [1] * 8),
        ("--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 1", [1, 2, 3, 2]),
        ("--pipeline-model-parallel-size 4 --decoder-last-pipeline-num-layers 5", [1, 1, 1, 5]),
        (
            "--pipeline-model-parallel-size 2 --account-for-embedding-in-pipeline-split "
            "--account-for-loss-in-pipeline-split --num-virtual-stages-per-pipeline-rank 2 --num-layers 6",
            [1, 2, 2, 1],
        ),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout E|t*4|(tt|)*1ttL", [0, 4, 2, 2]),
    ],
)
def test_stages(words: str, counts: list[int]) -> None:
    """P19: what the flags say is what the stages hold."""
    assert layers(words) == counts


def test_schedules() -> None:
    plan = pipeline_plan(validated("--pipeline-model-parallel-size 4"))
    assert (plan.schedule, plan.overlap) == ("1f1b", True)
    plan = pipeline_plan(
        validated(
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
            "--microbatch-group-size-per-virtual-pipeline-stage 3 --no-overlap-p2p-communication"
        )
    )
    assert (plan.schedule, plan.group_size, plan.overlap) == ("interleaved", 3, False)
    plan = pipeline_plan(validated("--pipeline-model-parallel-size 2 --delay-wgrad-compute"))
    assert plan.schedule == "zero-bubble"
    plan = pipeline_plan(validated("--pipeline-model-parallel-size 2 --pipeline-schedule gpipe"))
    assert plan.schedule == "gpipe"
    assert plan.describe() == "pipeline of 2 stages with 4 4 layers, schedule gpipe"


def test_any_number_of_microbatches() -> None:
    """P20: three microbatches on four interleaved ranks."""
    words = "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 3"
    assert validated(words).num_microbatches == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--pipeline-schedule gpipe", "--pipeline-schedule is for pipelines"),
        ("--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble", "needs --delay-wgrad-compute"),
        (
            "--pipeline-model-parallel-size 2 --pipeline-schedule 1f1b --num-virtual-stages-per-pipeline-rank 2",
            "1f1b has one chunk on each rank, not 2",
        ),
        ("--pipeline-model-parallel-layout Et*8L", "--pipeline-model-parallel-layout is for pipelines"),
        ("--pipeline-model-parallel-size 4 --num-layers 1", "stage 1 of 4 has nothing to do"),
        ("--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Et|t|t|tL", "has 4 layers"),
        (
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*8|mL",
            "mL has 1 m, --mtp-num-layers is 0",
        ),
        (
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*7m|tL --mtp-num-layers 1 "
            "--position-embedding-type rope",
            "put all prediction layers (m) on one stage",
        ),
        (
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*8m|mL --mtp-num-layers 2 "
            "--position-embedding-type rope",
            "put all prediction layers (m) on one stage",
        ),
        (
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*4|t*4|m|L --mtp-num-layers 1 "
            "--position-embedding-type rope",
            "use --pipeline-model-parallel-size 4",
        ),
        (
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*4|t*4|L",
            "has 3 stages: give a multiple",
        ),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*8|xL", "'x' means nothing"),
        (
            "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 "
            "--microbatch-group-size-per-virtual-pipeline-stage 3",
            "--microbatch-group-size-per-virtual-pipeline-stage 3 is less than",
        ),
        (
            "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 9",
            "--num-layers 8 does not fit",
        ),
    ],
)
def test_what_does_not_fit_is_refused(words: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        validated(words)
    assert message in str(caught.value)


def test_transformer_engine_delays_experts_only_where_they_are_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a pipeline too."""
    installed = SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: name))
    monkeypatch.setattr("megatron.train.arguments.resolve.importlib", installed)
    words = "--delay-wgrad-compute --num-experts 4 --transformer-impl"
    assert validated(f"{words} transformer_engine", device="cuda").delay_wgrad_compute
    unfused = "--no-gradient-accumulation-fusion"
    assert validated(f"{words} local {unfused}", device="cuda").delay_wgrad_compute
    with pytest.raises(ValueError, match="--delay-wgrad-compute with --no-gradient-accumulation-fusion"):
        validated(f"{words} transformer_engine {unfused}", device="cuda")
