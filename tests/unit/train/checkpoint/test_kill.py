"""kill -9 of any rank at any time: the run goes on from the last whole checkpoint and ends with the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]


def killed(folder: Path, kills: int) -> dict[str, object]:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "tests.unit.train.checkpoint.killed_runs", str(folder), str(kills), "7"]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "kills", [5, pytest.param(50, marks=pytest.mark.full)], ids=["five times", "fifty times"]
)
def test_killed_runs_end_as_one_that_was_not(tmp_path: Path, kills: int) -> None:
    """K08, K01: during steps, asynchronous saves, retention, start and resume; with dropout on."""
    result = killed(tmp_path, kills)
    assert result["errors"] == []
    assert result["kills"] >= kills
    assert result["resumed"] and result["ended"]
