"""The launch script for tensor, sequence and context parallelism under ZeRO-3, as a user runs it: 4 ranks."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SMALLER = "--train-iters 12 --num-layers 2 --lr 5e-3 --log-interval 1 --eval-iters 1 --eval-interval 12"


def test_the_model_learns(tmp_path: Path) -> None:
    """The loss falls, and is evaluated."""
    metrics = tmp_path / "metrics.jsonl"
    script = str(ROOT / "scripts" / "pretrain_gpt_tp2_cp2_fsdp.sh")
    command = [script, *SMALLER.split(), "--metrics-file", str(metrics)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [line for line in lines if "lm_loss" in line]
    assert len(steps) == 12
    assert steps[-1]["lm_loss"] < steps[0]["lm_loss"] - 0.5
    assert any("lm_loss_validation" in line for line in lines)
