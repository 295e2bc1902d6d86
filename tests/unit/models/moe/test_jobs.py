"""Whole jobs with experts: resume, load in another layout, pipeline stages without experts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.train.test_resume import assert_equal_weights, jobs, succeed

DEEPSEEK = (
    "--ffn-hidden-size 24 --global-batch-size 8 --train-iters 4 --eval-interval 2 --swiglu "
    "--position-embedding-type rope "
    "--disable-bias-linear --normalization RMSNorm --attention-dropout 0 --hidden-dropout 0 "
    "--untie-embeddings-and-output-weights --multi-latent-attention --q-lora-rank 8 --kv-lora-rank 8 "
    "--qk-head-dim 4 "
    "--qk-pos-emb-head-dim 4 --v-head-dim 6 --qk-layernorm --num-experts 4 --moe-layer-freq ([0]*1+[1]*1) "
    "--moe-ffn-hidden-size 8 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-bias-update-rate 0.01 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01 "
    "--mtp-num-layers 1 --data-parallel-sharding-strategy optim_grads_params"
)
LAYOUTS = {
    "ep2": "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall",
    "ep4": "--expert-model-parallel-size 4 --moe-token-dispatcher-type alltoall",
    "ep1": "--expert-model-parallel-size 1",
    "pp2-ep2": "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall",
    "tp2-ep2-etp2": "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2",
}


def test_two_and_two_steps_are_four(tmp_path: Path) -> None:
    """E06: the bias goes through the checkpoint bit for bit; evaluation moves nothing (E07)."""
    common = f"{DEEPSEEK} {LAYOUTS['ep2']}"
    four, two, rest = succeed(
        jobs(
            2,
            [
                common,
                f"{common} --exit-interval 2 --save {tmp_path}",
                f"{common} --load {tmp_path} --save {tmp_path}",
            ],
        )
    )
    assert two.numbers + rest.numbers == four.numbers
    assert_equal_weights(four, rest)
    assert four.series("mtp_loss") and four.series("seq_load_balancing_loss")


def test_any_layout_loads_what_another_saved(tmp_path: Path) -> None:
    """E09: a first stage without experts, logging every step; experts under their global numbers in the checkpoint."""
    save = f"{DEEPSEEK} {LAYOUTS['ep2']} --exit-interval 2 --save {tmp_path}"
    go_on = [f"{DEEPSEEK} {layout} --load {tmp_path}" for layout in LAYOUTS.values()]
    results = succeed(jobs(4, [save, *go_on]))[1:]
    for result in results[1:]:
        for name in ("lm_loss", "seq_load_balancing_loss", "mtp_loss", "grad_norm", "lm_loss_validation"):
            assert result.series(name) == pytest.approx(results[0].series(name), rel=2e-4), name
        assert result.series("max_expert_load") == pytest.approx(
            results[0].series("max_expert_load"), rel=0.02
        )


def test_loads_of_each_layer_are_told_when_asked_for() -> None:
    """--moe-per-layer-logging: the shares of a layer's experts sum to 1; without the flag there are none."""
    words = (
        "--num-experts 4 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 --train-iters 2"
    )
    told, silent = succeed(jobs(1, [f"{words} --moe-per-layer-logging", words]))
    for numbers in told.numbers[:2]:
        for layer in ("layer_0", "layer_1"):
            shares = [numbers[f"expert_load/{layer}/{i}"] for i in range(4)]
            assert sum(shares) == pytest.approx(1.0) and max(shares) > 0.25 - 1e-9
            assert numbers[f"max_expert_load/{layer}"] == pytest.approx(4 * max(shares))
            assert numbers[f"load_balancing_loss/{layer}"] > 0
    assert silent.series("max_expert_load") == told.series("max_expert_load") != []
    assert not any("/layer_" in name for numbers in silent.numbers for name in numbers)
