"""The launch script of the tiny DeepSeek-V3, as a user runs it: 4 ranks, EP 2 x CP 2, ZeRO-3, on the shipped corpus."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SMALLER = "--train-iters 12 --seq-length 64 --micro-batch-size 2 --global-batch-size 4 --log-interval 1 --eval-iters 1"


def test_the_tiny_deepseek_learns(tmp_path: Path) -> None:
    """Loss, the further token's loss and the loads are reported; the loss falls."""
    command = [str(ROOT / "scripts" / "pretrain_deepseek_tiny.sh"), str(tmp_path), *SMALLER.split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "lm_loss" in line]
    assert len(steps) == 12
    assert steps[-1]["lm_loss"] < steps[0]["lm_loss"] - 0.5
    assert steps[-1]["mtp_loss"] < steps[0]["mtp_loss"] - 0.5
    assert all(step["max_expert_load"] >= 1.0 and step["seq_load_balancing_loss"] > 0.5 for step in steps)
    assert any("lm_loss_validation" in line for line in lines)
