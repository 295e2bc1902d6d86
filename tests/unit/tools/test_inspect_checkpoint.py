"""What the inspector says of checkpoints whose content is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron.tools.inspect_checkpoint import main
from megatron.train.checkpoint import Progress, RunRecord, directory_of, save_checkpoint


def save(root: Path, iteration: int, value: float = 1.0) -> None:
    record = RunRecord(
        Progress(iteration, 8 * iteration),
        {"num_layers": 2, "hidden_size": 16, "moe": {"num_experts": 4}},
        {},
        {},
        {},
        {"lr": 0.1 * iteration, "seed": 1},
        world_size=4,
        layout={"tp": 2, "dp_shard": 2, "pp": 1},
    )
    tensors = {
        "model.a.weight": torch.full((4, 8), value),
        "optimizer.a.weight.exp_avg": torch.zeros(4, 8, dtype=torch.bfloat16),
        "rng/0": b"bytes",
    }
    save_checkpoint(root, tensors, record)


def test_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 3)
    save(tmp_path, 5)
    assert main(["show", str(tmp_path), "--keys", "--arguments"]) == 0
    text = capsys.readouterr().out
    for words in (
        "iter_0000005",
        "step      5, 40 samples",
        "4 ranks (tp 2, dp_shard 2)",
        "num_layers 2, hidden_size 16, 4 experts",
        "model     1 tensors, 32 elements, 0.00 MiB, fp32",
        "optimizer 1 tensors, 32 elements, 0.00 MiB, bf16",
        "objects   1: rng/0",
        "__0_0.distcp",
        "model.a.weight (4, 8) fp32, 1 piece(s)",
        "lr = 0.5",
    ):
        assert words in text, words
    assert main(["show", str(directory_of(tmp_path, 3)), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["progress"]["iteration"] == 3
    assert told["kinds"]["model"] == {"tensors": 1, "elements": 32, "bytes": 128, "dtypes": ["fp32"]}


def test_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 3)
    save(tmp_path, 5)
    assert main(["verify", str(tmp_path), "--all"]) == 0
    assert capsys.readouterr().out.count("is whole") == 2
    path = directory_of(tmp_path, 3) / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert main(["verify", str(tmp_path)]) == 0
    assert main(["verify", str(tmp_path), "--ckpt-step", "3"]) == 1
    assert f"{path} is damaged" in capsys.readouterr().out


def test_diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "one", 3)
    save(tmp_path / "other", 5, value=1.5)
    assert main(["diff", str(tmp_path / "one"), str(tmp_path / "one"), "--values"]) == 0
    assert capsys.readouterr().out == "no differences\n"
    assert main(["diff", str(tmp_path / "one"), str(tmp_path / "other"), "--values"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "progress.iteration: 3 and 5" in lines
    assert "arguments.lr: 0.30000000000000004 and 0.5" in lines
    assert "model.a.weight: 32 of 32 elements differ, at most by 0.5" in lines
    assert len(lines) == 4


def test_what_is_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.safetensors").write_text("x")
    (tmp_path / "empty").mkdir()
    for path, words in ((tmp_path, "model.safetensors"), (tmp_path / "empty", "holds no checkpoint")):
        for command in ("show", "verify"):
            assert main([command, str(path)]) == 2
            error = capsys.readouterr().err
            assert error.startswith("inspect_checkpoint: ") and words in error and error.count("\n") == 1
