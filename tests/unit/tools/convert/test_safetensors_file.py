"""Our reader and writer against the library's, byte for byte; damaged files are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from megatron.tools.convert.safetensors_file import (
    DTYPES,
    Described,
    FolderWriter,
    plan_files,
    read_folder,
    read_header,
    read_tensor,
)


def tensors() -> dict[str, torch.Tensor]:
    """One of each dtype, in no order; a scalar, an empty one, a name that JSON escapes."""
    generator = torch.Generator().manual_seed(1)
    found = {
        f"z{index}": torch.randint(0, 2, (3, index + 1), generator=generator).to(dtype)
        for index, dtype in enumerate(DTYPES.values())
    }
    return {**found, "scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4), 'a"ü\n': torch.arange(3.0)}


def test_the_same_bytes_as_the_library(tmp_path: Path) -> None:
    values = tensors()
    safetensors.torch.save_file(values, tmp_path / "theirs", metadata={"format": "pt"})
    described = {name: Described(tuple(value.shape), value.dtype) for name, value in values.items()}
    writer = FolderWriter(tmp_path, described, dict.fromkeys(values, "ours"))
    for name in reversed(values):
        writer.write(name, values[name])
    writer.close()
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    header = read_header(tmp_path / "theirs")
    assert header.keys() == values.keys()
    for name, value in values.items():
        read = read_tensor(header[name])
        assert read.dtype == value.dtype and read.shape == value.shape
        assert torch.equal(read.float(), value.float())


def test_plan_fills_files_in_order() -> None:
    described = {name: Described((10,), torch.float32) for name in "dcba"}
    assert plan_files(described, 10**9) == dict.fromkeys("dcba", "model.safetensors")
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    assert plan_files(described, 119) == {"d": first, "c": first, "b": second, "a": second}
    assert len(set(plan_files(described, 1).values())) == 4  # a tensor that is larger than a file has its own


def damage(folder: Path, kind: str) -> str:
    """Break a folder of two files; returns the words that must be in the message."""
    index, first = folder / "model.safetensors.index.json", folder / "model-00001-of-00002.safetensors"
    content = first.read_bytes()
    if kind == "cut":
        first.write_bytes(content[:-1])
        return f"{first} has {len(content) - 1} bytes instead of {len(content)}"
    if kind == "cut in the header":
        first.write_bytes(content[:20])
        return f"{first} is no safetensors file, or is cut off at 20 bytes"
    if kind == "no JSON":
        first.write_bytes(content[:8] + b"x" + content[9:])
        return f"{first} is no safetensors file: its header is not JSON"
    if kind == "missing":
        first.unlink()
        return f"{first} is missing"
    if kind == "index":
        index.write_text("{")
        return f"{index} is damaged"
    if kind == "other files":
        weight_map = json.loads(index.read_text())["weight_map"]
        index.write_text(json.dumps({"weight_map": {**weight_map, "more": first.name}}))
        return f"{first} has no tensor more"
    index.unlink()
    return f"{folder} has neither model.safetensors nor"


KINDS = ("cut", "cut in the header", "no JSON", "missing", "index", "other files", "neither")


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_one_line_with_the_file(kind: str, tmp_path: Path) -> None:
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    for name in names:
        safetensors.torch.save_file({name: torch.arange(4.0)}, tmp_path / name)
    weight_map = {name: name for name in names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert read_folder(tmp_path).keys() == set(names)
    words = damage(tmp_path, kind)
    with pytest.raises(ValueError) as caught:
        read_folder(tmp_path)
    assert words in str(caught.value) and "\n" not in str(caught.value)
