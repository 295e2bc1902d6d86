"""What runs on a GPU runs on CPU as far as it can, and says what it left."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.functional.cases import ROOT


def run(*words: str) -> str:
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_is_told_what_was_skipped() -> None:
    out = run("scripts/gpu_check.sh")
    assert "no CUDA device: SKIPPED the benchmark, the Transformer Engine tests and the contract table" in out


@pytest.mark.full
def test_the_benchmark_of_one_device_trains_every_variant() -> None:
    out = run(sys.executable, "-m", "benchmarks.fsdp_gpu", "--device", "cpu", "--rounds", "1", "--steps", "1")
    rows = [line.split("|")[1].strip() for line in out.splitlines() if line.startswith("| ")]
    assert rows == ["variant", "unwrapped", "torch FSDP2", "ours no_shard", "ours optim_grads", "ours ZeRO-3"]
