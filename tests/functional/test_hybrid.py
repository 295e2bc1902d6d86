"""HFSDP in training runs: optimizer states over both axes, the norm of experts that share dense meshes."""

from __future__ import annotations

import pytest

from tests.functional import golden, runs
from tests.functional.cases import Launch
from tests.functional.features import DEFAULTS, SCRIPTS, run_flags, words


def test_experts_under_hfsdp_count_once() -> None:
    """C01: with one expert-parallel rank experts have the groups, so the buffers, of the dense parameters."""
    cell = {
        **DEFAULTS,
        "model": "mixtral",
        "experts": "ep1",
        "dispatcher": "alltoall",
        "zero": "zero3",
        "outer": "hfsdp",
    }
    metrics = []
    for one in (cell, {**cell, "outer": "flat", "zero": "zero0"}):
        flags = {**run_flags(one), "--train-iters": 1, "--fp64": True, "--moe-router-dtype": "fp64"}
        launch = Launch(SCRIPTS["mixtral"], 4 if one is cell else 2, tuple(words(flags)))
        metrics.append(golden.select(runs.in_pool(launch), ("lm loss", "grad-norm")))
    for name in ("lm loss", "grad-norm"):
        assert metrics[0][name][1] == pytest.approx(metrics[1][name][1], rel=1e-9), name
