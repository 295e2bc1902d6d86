"""Numbers out of range, what experts and attention over ranks cannot have, and flags without effect."""

from __future__ import annotations

import pytest

from tests.unit.train.test_arguments import config, refused

EXPERTS = "--num-experts 4"
TP2 = f"{EXPERTS} --tensor-model-parallel-size 2"
FLEX = f"{EXPERTS} --moe-token-dispatcher-type flex"
INTERLEAVED = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank"


@pytest.mark.parametrize(
    ("words", "world_size", "expected"),
    [
        (
            f"{TP2} --moe-shared-expert-intermediate-size 33",
            2,
            "--moe-shared-expert-intermediate-size 33 is not a multiple of --tensor-model-parallel-size 2: take 34",
        ),
        (
            f"{TP2} --seq-length 33",
            2,
            "--seq-length 33 is not a multiple of --context-parallel-size 1 x --tensor",
        ),
        (f"{TP2} --seq-length 33", 2, "(--num-experts 4)"),
        (FLEX, 2, "--moe-token-dispatcher-type flex with --expert-model-parallel-size 1: it needs 2 or more"),
        (
            f"{FLEX} --expert-model-parallel-size 2 --tensor-model-parallel-size 2",
            4,
            "flex with --expert-tensor-parallel-size 2: add --expert-tensor-parallel-size 1, or use",
        ),
        (
            f"{FLEX} --expert-model-parallel-size 2",
            2,
            "--moe-flex-dispatcher-backend deepep needs the package deep_ep",
        ),
        (
            "--context-parallel-size 2 --attention-dropout 0 --window-size 4,0",
            2,
            "--window-size 4,0 with --context-parallel-size 2",
        ),
        (
            "--context-parallel-size 2 --attention-dropout 0 --softmax-type learnable",
            2,
            "--softmax-type learnable with --context-parallel-size 2",
        ),
        (f"{INTERLEAVED} -1", 2, "--num-virtual-stages-per-pipeline-rank -1: give 1 or more"),
        (f"{INTERLEAVED} 0", 2, "--num-virtual-stages-per-pipeline-rank 0: give 1 or more"),
        (
            f"{INTERLEAVED} 2 --microbatch-group-size-per-virtual-pipeline-stage 0",
            2,
            "--microbatch-group-size-per-virtual-pipeline-stage 0: give 1 or more",
        ),
    ],
)
def test_layouts_that_cannot_be(words: str, world_size: int, expected: str) -> None:
    assert expected in refused(words, world_size, resolve=config)


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("--moe-shared-expert-intermediate-size -4", "1 or more"),
        ("--moe-shared-expert-intermediate-size 0", "1 or more"),
        ("--moe-aux-loss-coeff -1.0", "0 or more"),
        ("--moe-z-loss-coeff -1.0", "0 or more"),
        ("--moe-z-loss-coeff nan", "a finite number"),
        ("--lr inf", "a finite number"),
        ("--clip-grad nan", "a finite number"),
        ("--adam-eps inf", "a finite number"),
        ("--moe-input-jitter-eps 5.0", "a number from 0 to below 1"),
        ("--moe-input-jitter-eps -0.5", "a number from 0 to below 1"),
        ("--moe-router-topk-scaling-factor 0.0", "a number above 0"),
        ("--moe-router-bias-update-rate -1.0", "0 or more"),
        ("--q-lora-rank 0", "1 or more"),
        ("--mup-width-mult 0.0", "a number above 0"),
        ("--activation-func-clamp-value -1.0", "a number above 0"),
        ("--eval-global-batch-size 0", "1 or more"),
        ("--eval-micro-batch-size -1", "1 or more"),
        ("--lion-beta1 -1.0", "0 or more"),
        ("--lion-beta2 1.0", "a number below 1"),
        ("--muon-num-ns-steps 0", "1 or more"),
        ("--initial-loss-scale 0.0", "a number above 0"),
        ("--fim-rate 1.5", "a number up to 1"),
        ("--lr-wsd-decay-iters -1", "0 or more"),
        ("--peak-tflops 0.0", "a number above 0"),
        ("--check-weight-hash-across-dp-replicas-interval 0", "1 or more"),
    ],
)
def test_numbers_out_of_range(words: str, fix: str) -> None:
    assert f"{words}: give {fix}" in refused(f"{EXPERTS} {words}", resolve=config)


def test_a_flag_without_effect_is_told() -> None:
    overlap, group = "--moe-shared-expert-overlap", "--microbatch-group-size-per-virtual-pipeline-stage"
    shared = f"{EXPERTS} --moe-shared-expert-intermediate-size 8 {overlap}"
    for words, line in (
        (overlap, "has no effect without --num-experts"),
        (f"{EXPERTS} {overlap}", "has no effect without --moe-shared-expert-intermediate-size"),
        (shared, "has no effect with another --moe-token-dispatcher-type than alltoall"),
        (f"{group} 2", f"{group} 2 has no effect without interleaving"),
    ):
        assert any(line in warning for warning in config(words).warnings), words
    assert not config(f"{shared} --moe-token-dispatcher-type alltoall").warnings
    assert not config(f"{INTERLEAVED} 2 {group} 4", 2).warnings


def test_a_missing_library_is_a_warning_of_a_validation_elsewhere() -> None:
    warnings = config(f"{FLEX} --expert-model-parallel-size 2 --validate-only", 2).warnings
    assert any("needs the package deep_ep" in line for line in warnings)
