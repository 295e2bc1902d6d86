"""--profile on chosen ranks with chosen detail, memory snapshots, and memory given back between steps."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.train.profiler import Profiler


def traced(folder: Path, rank: int = 0, **options: object) -> dict[str, Any] | None:
    """The trace that one step of `rank` leaves; None: no trace."""
    values: dict[str, Any] = {
        "profile": True, "profile_ranks": None, "profile_step_start": 0, "profile_step_end": 1,
        "use_pytorch_profiler": True, "pytorch_profiler_collect_callstack": False,
        "pytorch_profiler_collect_shapes": False, "tensorboard_dir": str(folder), "memory_snapshot_path": "x",
        "record_memory_history": False,
    }  # fmt: skip
    with Profiler(SimpleNamespace(**{**values, **options}), rank) as profiler:
        torch.ones(3, 5).exp()
        profiler.step(0)
    path = folder / f"trace_rank{rank}.json"
    return json.loads(path.read_text()) if path.exists() else None


def exp_event(trace: dict[str, Any] | None) -> dict[str, Any]:
    assert trace is not None
    return next(event["args"] for event in trace["traceEvents"] if event.get("name") == "aten::exp")


def test_ranks_that_are_not_named_are_not_profiled(tmp_path: Path) -> None:
    assert traced(tmp_path, 0) is not None and traced(tmp_path, 1) is None
    assert traced(tmp_path, 1, profile_ranks=[1, 3]) is not None
    assert traced(tmp_path / "named", 0, profile_ranks=[1, 3]) is None


def test_shapes_and_stacks_only_where_asked(tmp_path: Path) -> None:
    assert "Input Dims" not in exp_event(traced(tmp_path))
    assert exp_event(traced(tmp_path, pytorch_profiler_collect_shapes=True))["Input Dims"] == [[3, 5]]
    stacks = traced(tmp_path, pytorch_profiler_collect_callstack=True)
    assert stacks is not None
    assert any(event.get("cat") == "python_function" for event in stacks["traceEvents"])


@pytest.mark.parametrize("recorded", [True, False])
def test_a_memory_snapshot_is_written_at_the_end(monkeypatch: pytest.MonkeyPatch, recorded: bool) -> None:
    seen: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: seen.append("begun"))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", seen.append)
    config = SimpleNamespace(
        profile=False, profile_ranks=None, profile_step_start=0, profile_step_end=1, use_pytorch_profiler=True,
        pytorch_profiler_collect_callstack=False, pytorch_profiler_collect_shapes=False, tensorboard_dir=None,
        record_memory_history=recorded, memory_snapshot_path="memory.pickle",
    )  # fmt: skip
    with pytest.raises(KeyError), Profiler(config, 0):
        raise KeyError  # the snapshot matters most when a run ends badly
    assert seen == (["begun", "memory.pickle"] if recorded else [])
