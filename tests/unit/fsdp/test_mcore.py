"""megatron-core's GPTModel under our FSDP: the same losses and gradients as under its own DDP, in every layout."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from torch import nn

from megatron.fsdp.mcore import MegatronCoreFSDP
from tests.mcore.engine import run_mcore_ranks
from tests.mcore.training import Job, Result, run_jobs

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
TOLERANCE = 1e-6


def compare(world_size: int, job: Job, strategies: tuple[str, ...] = STRATEGIES) -> list[list[Result]]:
    """Run `job` under megatron-core's DDP and ours on `world_size` ranks; every rank must find them equal."""
    jobs = [replace(job, wrap="ddp", instances=1), *(replace(job, wrap=strategy) for strategy in strategies)]
    by_rank = run_mcore_ranks(run_jobs, world_size, jobs, timeout=120)
    for rank, (want, *results) in enumerate(by_rank):
        assert want.losses[-1] != want.losses[0], "nothing was trained"
        assert all(norm > 0 for norm in want.gradient_norms.values())
        for strategy, got in zip(strategies, results, strict=True):
            where = f"rank {rank}, {strategy}"
            assert got.losses == pytest.approx(want.losses, rel=TOLERANCE), where
            assert got.gradient_norms == pytest.approx(want.gradient_norms, rel=20 * TOLERANCE), where
            assert got.attributes == want.attributes, where
    return by_rank


def test_dense_model_trains_as_under_its_own_ddp() -> None:
    compare(2, Job(wrap="ddp"))


def test_tied_embedding_and_per_token_loss() -> None:
    """The output layer takes the embedding's weight in the model's own forward."""
    compare(2, Job(wrap="ddp", tied=True, per_token=True), ("optim", "optim_grads_params"))


def test_experts_over_their_own_ranks() -> None:
    compare(2, Job(wrap="ddp", expert=2, experts=4), ("no_shard", "optim_grads_params"))


def test_pipeline_with_tied_embedding() -> None:
    """First and last stage hold a copy each, cut at different rows."""
    compare(4, Job(wrap="ddp", pipeline=2, tied=True), ("optim", "optim_grads_params"))


def test_tensor_and_sequence_parallel() -> None:
    """finalize_model_grads sums the norms' gradients over the tensor-parallel ranks, by `main_grad`."""
    compare(4, Job(wrap="ddp", tensor=2, sequence_parallel=True), ("optim", "optim_grads_params"))


@pytest.mark.full
@pytest.mark.parametrize(
    "job",
    [
        Job(wrap="ddp", tensor=2, pipeline=1, experts=4, expert=2, sequence_parallel=True),
        Job(wrap="ddp", pipeline=2, virtual=2, microbatches=4),
        Job(wrap="ddp", pipeline=2, virtual=2, microbatches=4, align=True),
        Job(wrap="ddp", experts=4, expert=2),
        Job(wrap="ddp", instances=2),
    ],
    ids=["tp-ep", "interleaved", "interleaved-aligned", "ep-dp", "hybrid"],
)
def test_every_strategy_in_larger_layouts(job: Job) -> None:
    compare(4, job)


@pytest.mark.parametrize(
    ("config", "ddp_config", "named"),
    [
        ({"mtp_num_layers": 1}, {}, "mtp_num_layers=1"),
        ({"defer_embedding_wgrad_compute": True}, {}, "defer_embedding_wgrad_compute"),
        ({}, {"fp8_param_gather": True}, "fp8_param_gather"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(config: dict, ddp_config: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        MegatronCoreFSDP(SimpleNamespace(**config), SimpleNamespace(**ddp_config), nn.Linear(1, 1))
