"""The files of a checkpoint: written whole or not at all, named last, never losing the last good one."""

from __future__ import annotations

import json
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.train.checkpoint import (
    MARKER,
    RUN_FILE,
    Progress,
    Ranks,
    Retention,
    RunRecord,
    Saver,
    Target,
    check_same_model,
    directory_of,
    latest_iteration,
    load_tensors,
    read_record,
    read_shapes,
    save_checkpoint,
)
from megatron.train.errors import RunStopped
from tests.pool import run_ranks

MODEL = {"num_layers": 2, "hidden_size": 16, "hidden_dropout": 0.1, "rotary": {"base": 1e4}}


def record(iteration: int) -> RunRecord:
    return RunRecord(Progress(iteration, 8 * iteration), MODEL, {}, {}, {})


def save(root: Path, iteration: int, **options: Any) -> None:
    save_checkpoint(
        root, {"a": torch.full((4,), float(iteration)), "b": b"bytes"}, record(iteration), **options
    )


def load(root: Path, iteration: int) -> dict[str, Any]:
    tensors: dict[str, Any] = {"a": torch.zeros(4), "b": b""}
    load_tensors(root, iteration, tensors)
    return tensors


def test_round_trip(tmp_path: Path) -> None:
    assert latest_iteration(tmp_path) is None
    save(tmp_path, 3)
    assert latest_iteration(tmp_path) == 3
    assert read_record(tmp_path, 3) == record(3)
    assert read_shapes(tmp_path, 3) == {"a": (torch.Size([4]), torch.float32)}
    assert load(tmp_path, 3)["a"].tolist() == [3.0] * 4
    assert load(tmp_path, 3)["b"] == b"bytes"
    assert not list(tmp_path.glob("*.partial"))


def test_the_same_iteration_can_be_saved_again(tmp_path: Path) -> None:
    save(tmp_path, 3)
    (tmp_path / "iter_0000003.partial").mkdir()  # a killed save left this
    save(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000003", MARKER]


def test_a_new_key_in_the_second_save(tmp_path: Path) -> None:
    """X07"""
    save(tmp_path, 1)
    save_checkpoint(tmp_path, {"a": torch.ones(4), "c": torch.ones(2)}, record(2))
    assert set(read_shapes(tmp_path, 2)) == {"a", "c"}


def test_retention_keeps_multiples_and_the_last(tmp_path: Path) -> None:
    """K08: what is older goes only after the new one is complete; strangers' directories stay."""
    (tmp_path / "iter_notes").mkdir()
    for iteration in (2, 4, 6, 8, 9, 11):
        save(tmp_path, iteration, retain_interval=4)
    kept = {int(path.name[5:]) for path in tmp_path.glob("iter_0*")}
    assert kept == {4, 8, 11}
    assert (tmp_path / "iter_notes").exists()


def test_only_the_newest_stays_where_that_is_asked_for(tmp_path: Path) -> None:
    """Also of iterations that came before the run went back; a half-deleted one has no checkpoint's name."""
    for iteration in (2, 8):
        save(tmp_path, iteration)
    (tmp_path / "iter_0000001.partial").mkdir()
    tensors = {"a": torch.ones(4)}
    Saver(Ranks()).save(Target(tmp_path, record(4), Retention(only_newest=True)), tensors)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000004", MARKER]
    assert latest_iteration(tmp_path) == 4


def fill_the_disk(rank: int, world: int, root: str) -> tuple[str, int | None, list[float]]:
    """Rank 1 cannot write more than 2 kB from the second save on."""
    large = {"a": torch.arange(4096.0), f"rank{rank}": torch.full((4096,), float(rank))}
    save_checkpoint(root, large, record(1))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    message = ""
    if rank == world - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, before[1]))
    try:
        save_checkpoint(root, large, record(2), retain_interval=100)
    except RunStopped as error:
        message = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    tensors = {"a": torch.zeros(4096), f"rank{rank}": torch.zeros(4096)}
    load_tensors(root, 1, tensors)
    return message, latest_iteration(root), tensors[f"rank{rank}"][:2].tolist()


@pytest.mark.parametrize("world", [1, 2])
def test_a_full_disk_leaves_the_previous_one_good(tmp_path: Path, world: int) -> None:
    """K08: one line on every rank; marker and the older checkpoint are untouched, the partial one is gone."""
    results = run_ranks(fill_the_disk, world, str(tmp_path))
    assert len({message for message, _, _ in results}) == 1
    message = results[0][0]
    assert f"--save {tmp_path}: the checkpoint iter_0000002 could not be written" in message
    assert "The checkpoint of iteration 1 is still good" in message
    assert "\n" not in message
    for rank, (_, latest, values) in enumerate(results):
        assert latest == 1
        assert values == [float(rank)] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000001", MARKER]


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunStopped, match="--save .*file: .* could not be written"):
        save(tmp_path / "file", 1)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda d: (d / RUN_FILE).unlink(), "iter_0000003/run.json is missing, so there is no checkpoint"),
        (lambda d: (d / RUN_FILE).write_text("{"), "is damaged"),
        (lambda d: (d / RUN_FILE).write_text("[]"), "is damaged"),
        (lambda d: (d / RUN_FILE).write_text('{"format": 99}'), "has format 99"),
    ],
)
def test_a_bad_record_is_named(tmp_path: Path, damage: Any, words: str) -> None:
    save(tmp_path, 3)
    damage(directory_of(tmp_path, 3))
    with pytest.raises(ValueError, match=words):
        read_record(tmp_path, 3)


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("how", ["gone", "empty", "cut"])
def test_a_bad_tensor_file_is_named(tmp_path: Path, file: str, how: str) -> None:
    save(tmp_path, 3)
    path = directory_of(tmp_path, 3) / file
    content = path.read_bytes()
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(b"" if how == "empty" else content[: len(content) // 2])
    with pytest.raises(ValueError, match="--load: .*iter_0000003"):
        read_shapes(tmp_path, 3)
        load(tmp_path, 3)


def test_a_bad_marker_is_named(tmp_path: Path) -> None:
    (tmp_path / MARKER).write_text("release")
    with pytest.raises(ValueError, match=f"{MARKER} holds 'release'"):
        latest_iteration(tmp_path)


def test_another_model_is_refused() -> None:
    check_same_model(record(1), {**MODEL, "hidden_dropout": 0.0})
    with pytest.raises(ValueError, match="num_layers is 2 there, 3 here; rotary is .* there, None here"):
        check_same_model(record(1), {"num_layers": 3, "hidden_size": 16, "hidden_dropout": 0.1})


def test_the_record_is_readable(tmp_path: Path) -> None:
    save(tmp_path, 3)
    content = json.loads((directory_of(tmp_path, 3) / RUN_FILE).read_text())
    assert content["progress"]["consumed_train_samples"] == 24
    assert content["model"]["rotary"] == {"base": 1e4}
