"""Whole or not, named by file and cause; the newest whole one; folders of something else. Nothing is ever written."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron.train.checkpoint import (
    CHECKSUM_FILE,
    MARKER,
    METADATA_FILE,
    RUN_FILE,
    ChoiceOptions,
    Found,
    Progress,
    Ranks,
    RunRecord,
    choose_checkpoint,
    directory_of,
    existing_directory,
    faults,
    find_checkpoint,
    read_record,
    save_checkpoint,
)

DATA = "__0_0.distcp"


def save(root: Path, *iterations: int) -> None:
    for iteration in iterations:
        record = RunRecord(Progress(iteration, 8 * iteration), {}, {}, {}, {})
        save_checkpoint(root, {"a": torch.arange(64.0) + iteration}, record)


def flip(path: Path) -> None:
    """One bit in the middle; the size stays."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def turn_into_a_folder(path: Path) -> None:
    """Reading it fails as it does without permission; tests may run as root, who has all of them."""
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "data flipped": (DATA, flip, "is damaged: its content does not match its checksum"),
    "data cut": (DATA, cut, r"has \d+ bytes instead of \d+"),
    "data empty": (DATA, lambda path: path.write_bytes(b""), r"has 0 bytes instead of \d+"),
    "data gone": (DATA, Path.unlink, "is missing"),
    "data a folder": (DATA, turn_into_a_folder, r"has \d+ bytes instead of \d+|cannot be read"),
    "metadata flipped": (METADATA_FILE, flip, "is damaged"),
    "metadata gone": (METADATA_FILE, Path.unlink, "is missing"),
    "record flipped": (RUN_FILE, flip, "is damaged"),
    "record gone": (RUN_FILE, Path.unlink, "is missing"),
    "sums not JSON": (CHECKSUM_FILE, lambda path: path.write_text("{"), "is damaged"),
    "sums of something else": (
        CHECKSUM_FILE,
        lambda path: path.write_text('{"files": {}}'),
        r"is missing from",
    ),
}


def snapshot(root: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(root.rglob("*"))}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named_and_passed_over(tmp_path: Path, name: str) -> None:
    """One line with file and cause, the newest whole checkpoint before it, and nothing is written."""
    save(tmp_path, 3, 5)
    file, damage, words = DAMAGE[name]
    path = directory_of(tmp_path, 5) / file
    assert faults(path.parent, contents=True) == []
    damage(path)
    before = snapshot(tmp_path)
    (fault, *_) = faults(path.parent, contents=True)
    assert str(path.name) in fault and "\n" not in fault
    assert re.search(words, fault), fault
    found = choose_checkpoint(str(tmp_path), Ranks(), ChoiceOptions(contents=True))
    assert found == Found(3, (fault,))
    with pytest.raises(ValueError, match="^--load: ") as asked:
        choose_checkpoint(str(tmp_path), Ranks(), ChoiceOptions(5, contents=True))
    assert fault in str(asked.value) and "--ckpt-step (3)" in str(asked.value)
    assert snapshot(tmp_path) == before


def test_nothing_whole_is_an_error(tmp_path: Path) -> None:
    save(tmp_path, 3, 5)
    for iteration in (3, 5):
        cut(directory_of(tmp_path, iteration) / DATA)
    with pytest.raises(ValueError, match="iter_0000005.*iter_0000003.*no checkpoint there is whole"):
        find_checkpoint(tmp_path)


def test_the_marker_decides(tmp_path: Path) -> None:
    """What is newer than the marker's belongs to another future of the run."""
    save(tmp_path, 3, 5, 4)
    assert find_checkpoint(tmp_path) == Found(4)
    assert find_checkpoint(tmp_path, ChoiceOptions(5)) == Found(5)
    (tmp_path / MARKER).unlink()
    found = find_checkpoint(tmp_path)
    assert found is not None and found.iteration == 5 and MARKER in found.warnings[0]
    (tmp_path / MARKER).write_text("rele\x00se")
    found = find_checkpoint(tmp_path)
    assert found is not None and found.iteration == 5 and "instead of an iteration" in found.warnings[0]


def test_a_marker_without_its_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 3)
    (tmp_path / MARKER).write_text("9")
    found = find_checkpoint(tmp_path)
    assert found is not None and found.iteration == 3 and "iter_0000009 is missing" in found.warnings[0]


def test_a_checkpoint_that_was_being_replaced_is_found(tmp_path: Path) -> None:
    """kill -9 between the two renames of a second save of the same iteration."""
    save(tmp_path, 3)
    directory = directory_of(tmp_path, 3)
    directory.rename(directory.with_name(directory.name + ".old"))
    (tmp_path / "iter_0000003.partial").mkdir()
    assert find_checkpoint(tmp_path) == Found(3)
    assert read_record(tmp_path, 3).progress.iteration == 3
    assert faults(existing_directory(tmp_path, 3), contents=True) == []
    save(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000003", MARKER]


def test_without_sums_sizes_count(tmp_path: Path) -> None:
    """What another program wrote has no list of sums."""
    save(tmp_path, 3)
    directory = directory_of(tmp_path, 3)
    (directory / CHECKSUM_FILE).unlink()
    assert faults(directory, contents=True) == []
    cut(directory / DATA)
    (fault,) = faults(directory)
    assert f"{DATA} has" in fault
    (directory / DATA).unlink()
    assert faults(directory) == [f"{directory / DATA} is missing"]


FOREIGN: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file": (lambda root: root.write_text("x"), "is a file"),
    "Hugging Face's": (
        lambda root: (root.mkdir(), (root / "model.safetensors").write_text("x")),
        "holds model.safetensors.*convert_checkpoint",
    ),
    "one checkpoint": (lambda root: (root.mkdir(), (root / RUN_FILE).write_text("{}")), "is one checkpoint"),
    "torch's": (
        lambda root: (root.mkdir(), (root / METADATA_FILE).write_text("")),
        "^--load .* is a checkpoint of another program.*convert_checkpoint from-megatron-core",
    ),
    "megatron-core's": (
        lambda root: ((root / "iter_0000002").mkdir(parents=True), (root / "iter_0000002/common.pt").touch()),
        "iter_0000002 is a checkpoint of another program.*common.pt.*convert_checkpoint from-megatron-core",
    ),
    "Megatron-LM's old": (
        lambda root: (
            (root / "iter_0000002/mp_rank_00").mkdir(parents=True),
            (root / MARKER).write_text("2"),
        ),
        "mp_rank_.*--ckpt-format torch_dist.*convert_checkpoint from-megatron-core",
    ),
    "notes": (
        lambda root: (root.mkdir(), (root / "readme.txt").write_text("x")),
        "^--load .*is not the --save directory of a run .it holds readme.txt",
    ),
    "a model without weights": (
        lambda root: ((root / "model").mkdir(parents=True), (root / "config.json").write_text("{}")),
        "^--load .*is not the --save directory of a run .it holds config.json",
    ),
    "a marker of words": (
        lambda root: (root.mkdir(), (root / MARKER).write_text("release")),
        "holds 'release' instead of an iteration",
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_no_checkpoint_is_refused(tmp_path: Path, name: str) -> None:
    make, words = FOREIGN[name]
    root = tmp_path / "given"
    make(root)
    before = snapshot(tmp_path)
    with pytest.raises(ValueError, match=words) as caught:
        find_checkpoint(root)
    assert str(root) in str(caught.value) and "\n" not in str(caught.value)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    "name",
    [
        "wandb_run_id.txt",
        "tensorboard",
        "events.out.tfevents.1.host",
        "metrics.jsonl",
        "train.log",
        "logs",
        ".keep",
    ]
    + ["non_persistent", "iter_0000003.partial", "snapshot.pickle", "lost+found", "launch.sh", "slurm-7.out"],
)
def test_what_a_run_leaves_before_its_first_checkpoint(tmp_path: Path, name: str) -> None:
    """--save and --load name one folder from the first start on; --wandb-project writes its id there."""
    (tmp_path / name).mkdir()
    assert find_checkpoint(tmp_path) is None


def test_an_empty_or_new_folder_holds_nothing_yet(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path) is None
    assert find_checkpoint(tmp_path / "new") is None
    with pytest.raises(ValueError, match="run.json is missing, so there is no checkpoint"):
        find_checkpoint(tmp_path, ChoiceOptions(5))


def test_sums_are_those_of_the_files(tmp_path: Path) -> None:
    """Against hashlib on whole files, and every file but the list itself is in it."""
    save(tmp_path, 3)
    directory = directory_of(tmp_path, 3)
    listed = json.loads((directory / CHECKSUM_FILE).read_text())["files"]
    assert set(listed) == {path.name for path in directory.iterdir()} - {CHECKSUM_FILE}
    for name, one in listed.items():
        content = (directory / name).read_bytes()
        assert one == {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
