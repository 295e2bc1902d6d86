"""Names and shapes that do not fit, files that cannot be read, single tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.train.checkpoint import (
    CheckpointReader,
    DamagedCheckpointError,
    LoadOptions,
    Progress,
    RunRecord,
    directory_of,
    load_tensors,
    save_checkpoint,
)
from megatron.train.checkpoint.load import STRICTNESS


def saved(root: Path) -> Path:
    """A checkpoint of "a", "b" and one rank's random state."""
    record = RunRecord(Progress(3, 24), {}, {}, {}, {})
    tensors = {"a": torch.arange(4.0), "optimizer.a": torch.ones(2), "rng/0": b"bytes"}
    return save_checkpoint(root, tensors, record)


def request() -> dict[str, Any]:
    """ "a" is there, "c" is not, "optimizer.a" is not asked for."""
    return {"a": torch.zeros(4), "c": torch.full((1,), 7.0)}


@pytest.mark.parametrize("strictness", STRICTNESS)
def test_strictness(tmp_path: Path, strictness: str) -> None:
    """Every value of --dist-ckpt-strictness on a key that only the run and one that only the checkpoint has."""
    saved(tmp_path)
    on_unexpected, on_missing = STRICTNESS[strictness]
    tensors = request()
    if on_unexpected == "fail":
        with pytest.raises(ValueError, match=r"--load: .*iter_0000003 .*c(,| is missing|;)"):
            load_tensors(tmp_path, 3, tensors, LoadOptions(strictness))
        assert tensors["a"].tolist() == [0.0] * 4
        return
    lines = "; ".join(load_tensors(tmp_path, 3, tensors, LoadOptions(strictness)))
    assert tensors["a"].tolist() == [0.0, 1.0, 2.0, 3.0] and tensors["c"].item() == 7.0
    assert ("lacks c" in lines) == (on_unexpected == "tell")
    assert ("does not want, optimizer.a" in lines) == (on_missing == "tell")
    assert "rng/0" not in lines


def test_a_missing_key_fails_only_where_asked(tmp_path: Path) -> None:
    saved(tmp_path)
    tensors = {"a": torch.zeros(4)}
    assert load_tensors(tmp_path, 3, tensors) == []
    with pytest.raises(
        ValueError, match=r"does not want, optimizer\.a; --dist-ckpt-strictness raise_all forbids"
    ):
        load_tensors(tmp_path, 3, tensors, LoadOptions("raise_all"))
    assert load_tensors(tmp_path, 3, tensors, LoadOptions("raise_all", ("rng/", "optimizer."))) == []


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(ValueError, match="c, d are missing"):
        load_tensors(tmp_path, 3, {"c": torch.zeros(1), "d": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"a has shape \(4,\) there, \(5,\) here"):
        load_tensors(tmp_path, 3, {"a": torch.zeros(5)})


@pytest.mark.parametrize("how", ["gone", "empty", "cut"])
def test_a_bad_file_is_named_while_it_is_read(tmp_path: Path, how: str) -> None:
    """The file and the cause in one line, and an error that tells damage from a misfit."""
    path = saved(tmp_path) / "__0_0.distcp"
    content = path.read_bytes()
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(b"" if how == "empty" else content[: len(content) // 2])
    with pytest.raises(
        DamagedCheckpointError, match=r"^--load: .*__0_0\.distcp is (missing|damaged \()"
    ) as caught:
        load_tensors(tmp_path, 3, {"a": torch.zeros(4)})
    assert "\n" not in str(caught.value)


def test_a_reader_gives_single_tensors(tmp_path: Path) -> None:
    reader = CheckpointReader(saved(tmp_path))
    assert list(reader.tensors) == ["a", "optimizer.a"] and reader.objects == ["rng/0"]
    assert torch.equal(reader.tensor("a"), torch.arange(4.0))
    (directory_of(tmp_path, 3) / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(ValueError, match=r"__0_0\.distcp is damaged"):
        reader.tensor("a")
