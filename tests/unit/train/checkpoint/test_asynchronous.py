"""Saves behind training: what they write, what they cost, when they count, how they fail; and what all saves talk.

Whether the file is written early or late is not left to luck: `Gate` holds the writing thread.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron.train.checkpoint import (
    Progress,
    Ranks,
    Retention,
    RunRecord,
    Saver,
    Target,
    latest_iteration,
    load_tensors,
    read_shapes,
)
from megatron.train.checkpoint import save as save_module
from megatron.train.checkpoint.shard import Written, write_shard
from megatron.train.errors import RunStopped
from tests.pool import run_ranks


class Gate:
    """Stands in for write_shard: waits until it is opened, or fails."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.error: Exception | None = None

    def __call__(self, *args: Any) -> Written:
        assert self.open.wait(60)
        if self.error is not None:
            raise self.error
        return write_shard(*args)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    made = Gate()
    monkeypatch.setattr(save_module, "write_shard", made)
    return made


def target(root: Path | str, iteration: int, retention: Retention | None = None) -> Target:
    record = RunRecord(Progress(iteration, 8 * iteration), {}, {}, {}, {})
    return Target(Path(root), record, retention or Retention())


def state(value: float) -> dict[str, Any]:
    return {"weights": torch.full((64,), value), "step": torch.tensor(value), "rng/0": bytes([int(value)])}


def loaded(root: Path, iteration: int) -> dict[str, Any]:
    tensors = state(0.0)
    load_tensors(root, iteration, tensors)
    return tensors


def assert_state(tensors: dict[str, Any], value: float) -> None:
    assert tensors["weights"].tolist() == [value] * 64
    assert tensors["step"].item() == value and tensors["rng/0"] == bytes([int(value)])


def test_what_is_written_is_what_was_when_save_was_called(tmp_path: Path, gate: Gate) -> None:
    """Training changes every tensor in place before a byte is written."""
    saver, tensors = Saver(Ranks(), background=True), state(3.0)
    saver.save(target(tmp_path, 3), tensors)
    tensors["weights"].mul_(7)
    tensors["step"].add_(1)
    gate.open.set()
    saver.finish()
    assert_state(loaded(tmp_path, 3), 3.0)
    assert [one.record.progress.iteration for one in saver.take_finished()] == [3]
    assert saver.take_finished() == []


def test_the_extra_memory_is_one_copy_of_the_shard(tmp_path: Path) -> None:
    """Buffers are those of the first save for ever, and hold exactly what is saved; a plain save has none."""
    saver, tensors = Saver(Ranks(), background=True), state(1.0)
    expected = tensors["weights"].nbytes + tensors["step"].nbytes
    places = set()
    for iteration in (1, 2, 3):
        saver.save(target(tmp_path, iteration), tensors)
        saver.finish()
        assert saver.staging.nbytes == expected
        places.add(tuple(sorted(buffer.data_ptr() for buffer in saver.staging._buffers.values())))
    assert len(places) == 1
    plain = Saver(Ranks())
    plain.save(target(tmp_path, 4), tensors)
    assert plain.staging.nbytes == 0


@pytest.mark.parametrize("background", [False, True])
def test_a_saver_keeps_no_hold_of_what_it_saved(tmp_path: Path, background: bool) -> None:
    """K15: after a save the run's tensors are as free as before it."""
    saver, tensors = Saver(Ranks(), background=background), state(1.0)
    seen = weakref.ref(tensors["weights"])
    saver.save(target(tmp_path, 1), tensors)
    saver.finish()
    del tensors
    gc.collect()
    assert seen() is None


def test_a_save_counts_when_it_is_complete(tmp_path: Path, gate: Gate) -> None:
    """K08: until then marker and older checkpoints stay, retention included."""
    gate.open.set()
    saver, retention = Saver(Ranks(), background=True), Retention(100)
    saver.save(target(tmp_path, 1), state(1.0))
    saver.finish()
    gate.open.clear()
    saver.save(target(tmp_path, 2, retention), state(2.0))
    assert latest_iteration(tmp_path) == 1 and not saver.failed
    assert_state(loaded(tmp_path, 1), 1.0)
    gate.open.set()
    saver.finish()
    assert latest_iteration(tmp_path) == 2
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000002"]


@pytest.mark.parametrize("by", ["finish", "save"])
def test_an_error_behind_training_surfaces(tmp_path: Path, gate: Gate, by: str) -> None:
    """K08: once, as the line that a save at once gives; the checkpoint before it is intact."""
    gate.open.set()
    saver = Saver(Ranks(), background=True)
    saver.save(target(tmp_path, 1), state(1.0))
    saver.finish()
    gate.error = OSError(errno.ENOSPC, "No space left on device")
    saver.save(target(tmp_path, 2), state(2.0))
    saver.wait()
    assert saver.failed
    with pytest.raises(RunStopped, match="iter_0000002 could not be written .*the disk is full") as caught:
        saver.finish() if by == "finish" else saver.save(target(tmp_path, 3), state(3.0))
    assert "iteration 1 is still good" in str(caught.value)
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000001"]
    gate.error = None
    saver.save(target(tmp_path, 3), state(3.0))
    saver.finish()
    assert latest_iteration(tmp_path) == 3 and not saver.failed


def test_plans_are_reused_only_when_nothing_changed(tmp_path: Path) -> None:
    """X07: a new key, another dtype, another shape each make new plans."""
    saver, tensors = Saver(Ranks()), state(1.0)
    changes: list[tuple[dict[str, Any], int]] = [
        ({}, 0),
        ({}, 1),
        ({"new": torch.ones(2)}, 1),
        ({}, 2),
        ({"weights": torch.ones(64, dtype=torch.float64)}, 2),
        ({"weights": torch.ones(32)}, 2),
        ({"rng/0": torch.ones(1)}, 2),
        ({}, 3),
    ]
    for iteration, (change, reused) in enumerate(changes, start=1):
        tensors |= change
        saver.save(target(tmp_path, iteration), tensors)
        assert saver.plans.reused == reused, change
        shapes = {
            name: (one.shape, one.dtype) for name, one in tensors.items() if isinstance(one, torch.Tensor)
        }
        assert read_shapes(tmp_path, iteration) == shapes
        again = {name: torch.zeros_like(one) for name, one in tensors.items() if name in shapes}
        load_tensors(tmp_path, iteration, again)
        assert all(torch.equal(again[name], tensors[name]) for name in shapes)


TALK = ("all_gather", "all_reduce", "barrier", "broadcast", "gather", "reduce", "scatter", "send", "recv")


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts torch.distributed's collectives, those beneath object collectives included."""
    calls: Counter[str] = Counter()
    originals = {name: getattr(distributed_c10d, name) for name in TALK}

    def counting(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return originals[name](*args, **kwargs)

        return call

    for name in TALK:
        setattr(distributed_c10d, name, counting(name))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(distributed_c10d, name, original)


def talk_of_saves(rank: int, world: int, root: str) -> dict[str, Any]:
    """Saves of few and many tensors, at once and behind other collectives, on a group of their own."""
    seen: dict[str, Any] = {}
    group = dist.new_group(backend="gloo")
    for background in (False, True):
        saver, folder = Saver(Ranks(group), background=background), f"{root}/{background}"
        for iteration, number in enumerate((1, 40, 40), start=1):
            tensors: dict[str, Any] = {f"shared{i}": torch.full((4,), float(i)) for i in range(number)}
            tensors |= {f"own{rank}.{i}": torch.full((4,), 1.0 + i) for i in range(number)}
            with counted() as calls:
                saver.save(target(folder, iteration), tensors)
                saver.wait()
            seen[f"{background} {iteration}"] = dict(calls)
            ones = torch.ones(1)
            dist.all_reduce(ones)  # training's group is free at any time
            assert ones.item() == world
            saver.finish()
        seen[f"{background} reused"] = saver.plans.reused
        again = {f"own{rank}.39": torch.zeros(4), "shared7": torch.zeros(4)}
        load_tensors(folder, 3, again)
        seen[f"{background} values"] = {name: value[0].item() for name, value in again.items()}
    return seen


def test_saves_talk_alike_however_many_tensors_there_are(tmp_path: Path) -> None:
    """K06: four object collectives, each of two or three tensor collectives; a repeated save reuses its plans."""
    for rank, seen in enumerate(run_ranks(talk_of_saves, 2, str(tmp_path))):
        for background in (False, True):
            few, many, again = (seen[f"{background} {iteration}"] for iteration in (1, 2, 3))
            assert few == many == again and 0 < sum(few.values()) <= 9, few
            assert seen[f"{background} reused"] == 1
            assert seen[f"{background} values"] == {f"own{rank}.39": 40.0, "shared7": 7.0}
