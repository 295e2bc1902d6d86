"""A training that megatron-core began goes on with ours, with the losses that it would have had."""

from __future__ import annotations

import importlib.util
import json
import pickle
import shutil
import subprocess
import sys
import types
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron.tools.convert.command import main
from megatron.tools.convert.core_checkpoint import open_checkpoint
from megatron.train.checkpoint import CHECKSUM_FILE, METADATA_FILE, read_record
from tests.pool import run_ranks
from tests.unit.tools.convert.core_runs import BATCH, arguments, go_on_with_all

pytestmark = pytest.mark.filterwarnings("ignore")
LAYOUTS = {
    0: "--data-parallel-sharding-strategy optim_grads_params",
    4: "--data-parallel-sharding-strategy optim --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall",
}


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]]]:
    """Folders of megatron-core's checkpoints by number of experts, and the losses of the runs that left them."""
    if importlib.util.find_spec("megatron.core") is None:
        pytest.skip("megatron-core is not installed (pip install --no-deps megatron-core==0.16.1)")
    folder = tmp_path_factory.mktemp("core")
    command = [sys.executable, "-m", "tests.unit.tools.convert.core_runs", str(folder), *map(str, LAYOUTS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("experts", LAYOUTS, ids=["dense", "experts"])
def test_a_training_of_megatron_core_goes_on(
    experts: int, core: tuple[Path, dict[str, list[float]]], tmp_path: Path
) -> None:
    """Weights, moments, step, learning rate and data position; then the same model by Megatron-FSDP's names."""
    folder, losses = core[0] / str(experts), core[1][str(experts)]
    (folder / "latest_checkpointed_iteration.txt").write_text("2")
    sources = {"ours": folder, "again": as_fsdp_dtensor(folder / "iter_0000002", tmp_path / "fsdp_dtensor")}
    for name, source in sources.items():
        assert main(["from-megatron-core", "--load", str(source), "--save", str(tmp_path / name)]) == 0
    for results in run_ranks(
        go_on_with_all, 2, [tmp_path / name for name in sources], LAYOUTS[experts], timeout=300
    ):
        for found, iteration, samples in results:
            assert (iteration, samples) == (2, 2 * BATCH)
            torch.testing.assert_close(torch.tensor(found), torch.tensor(losses[2:]), rtol=1e-5, atol=0)
    assert losses[3] != pytest.approx(losses[2], rel=1e-3)


def as_fsdp_dtensor(source: Path, target: Path) -> Path:
    """A torch_dist checkpoint written once more by the names that Megatron-FSDP's checkpoints have."""
    checkpoint = open_checkpoint(source)
    values: dict[str, object] = {
        "args": Namespace(**vars(checkpoint.common["args"])),
        "iteration": checkpoint.common["iteration"],
    }
    for name, value in checkpoint.common["opt_param_scheduler"].items():
        values[f"opt_param_scheduler.{name}"] = value
    for name in names_of(checkpoint.common["args"]):
        for kind in ("", "exp_avg", "exp_avg_sq"):
            tensor = checkpoint.read(checkpoint.find(name, kind))
            gated = "linear_fc1.weight" in name
            parts = {"_w": tensor.chunk(2)[0], "_v": tensor.chunk(2)[1]} if gated else {"": tensor}
            for suffix, part in parts.items():
                key = (
                    f"optimizer.state.module.module.{name}{suffix}.{kind}"
                    if kind
                    else f"model.module.{name}{suffix}"
                )
                values[key] = part.clone()
        values[f"optimizer.param_to_group_meta.module.module.{name}.step"] = 2
    dcp.save(values, checkpoint_id=target, no_dist=True)
    return target


def names_of(args: Namespace) -> list[str]:
    names = ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight"]
    for layer in range(args.num_layers):
        prefix = f"decoder.layers.{layer}."
        attention = ("linear_qkv.layer_norm_weight", "linear_qkv.weight", "linear_proj.weight")
        names += [f"{prefix}self_attention.{name}" for name in attention]
        experts = getattr(args, "num_experts", 0)
        if not experts:
            names += [
                f"{prefix}mlp.linear_{name}" for name in ("fc1.layer_norm_weight", "fc1.weight", "fc2.weight")
            ]
            continue
        names += [f"{prefix}pre_mlp_layernorm.weight", f"{prefix}mlp.router.weight"]
        names += [f"{prefix}mlp.experts.linear_fc{part}.weight{i}" for part in (1, 2) for i in range(experts)]
    return names


def test_what_cannot_be_imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No checkpoint; no arguments; a tensor missing; another shape; state by buckets: one line, nothing written."""

    def fails(name: str, values: dict[str, object]) -> str:
        dcp.save(values, checkpoint_id=tmp_path / name, no_dist=True)
        words = ["from-megatron-core", "--load", str(tmp_path / name), "--save", str(tmp_path / "ours")]
        assert main(words) == 2
        text = capsys.readouterr().err
        assert text.count("\n") == 1 and not (tmp_path / "ours").exists()
        return text

    words = ["from-megatron-core", "--load", str(tmp_path), "--save", str(tmp_path / "ours")]
    assert main(words) == 2
    assert f"{tmp_path / '.metadata'} is missing" in capsys.readouterr().err
    args = Namespace(**arguments(0))
    embedding = {"model.module.embedding.word_embeddings.weight": torch.zeros(64, 32)}
    assert "holds no arguments (args)" in fails("a", {**embedding, "iteration": 1})
    assert "not a GPT model" in fails("b", {"x": torch.zeros(1), "args": args})
    assert "lacks decoder.final_layernorm.weight" in fails("c", {**embedding, "args": args})
    wide = {"model.module.embedding.word_embeddings.weight": torch.zeros(64, 33)}
    assert "has shape [64, 33], but its arguments mean [61, 32]" in fails("d", {**wide, "args": args})
    buckets = {"optimizer.distributed.dp_group_idx_0.exp_avg": torch.zeros(3)}
    assert "--dist-ckpt-optim-fully-reshardable" in fails("e", {**embedding, **buckets, "args": args})


def test_moments_need_their_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Dropping them would look like going on; samples that were skipped are no iterations."""
    args = Namespace(**arguments(0), skipped_train_samples=123)
    shapes = {"linear_qkv.weight": (64, 32), "linear_proj.weight": (32, 32), "fc1.weight": (96, 32)}
    shapes |= {"fc2.weight": (32, 48), "embeddings.weight": (64, 32), "output_layer.weight": (64, 32)}
    weights = {
        name: torch.zeros(next((shape for end, shape in shapes.items() if name.endswith(end)), (32,)))
        for name in names_of(args)
    }
    values = {**weights, "args": args, "iteration": 2}
    dcp.save(values, checkpoint_id=tmp_path / "plain", no_dist=True)
    words = ["--load", str(tmp_path / "plain"), "--save", str(tmp_path / "ours")]
    assert main(["from-megatron-core", *words]) == 0
    assert read_record(tmp_path / "ours", 2).progress.skipped_iterations == 0
    moments = {f"optimizer.state.exp_avg.{name}": value for name, value in weights.items()}
    dcp.save({**values, **moments}, checkpoint_id=tmp_path / "moments", no_dist=True)
    words = ["--load", str(tmp_path / "moments"), "--save", str(tmp_path / "other")]
    assert main(["from-megatron-core", *words]) == 2
    assert "holds exp_avg but no step of the optimizer" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_objects_of_the_writer_need_not_be_here(
    core: tuple[Path, dict[str, list[float]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Enumerations, functions and plans in common.pt and .metadata, of a module that is gone when they are read."""
    source = shutil.copytree(core[0] / "0" / "iter_0000002", tmp_path / "theirs")
    writer = types.ModuleType("megatron.core.writer")
    exec(
        "import enum\nclass Backend(enum.Enum):\n    flash = 1\nclass Plan(dict):\n    pass\n"
        "class Steps(list):\n    pass\ndef activation(x):\n    return x\n",
        writer.__dict__,
    )
    monkeypatch.setitem(sys.modules, "megatron.core.writer", writer)
    common = torch.load(source / "common.pt", weights_only=False)
    common["args"].attention_backend = writer.Backend.flash
    common["args"].activation_func = writer.activation
    common["plans"] = [writer.Plan(a=1), writer.Steps([1, 2])]
    torch.save(common, source / "common.pt")
    metadata = dcp.FileSystemReader(source).read_metadata()
    metadata.all_local_plans = [writer.Plan(a=1)]
    (source / ".metadata").write_bytes(pickle.dumps(metadata))
    monkeypatch.delitem(sys.modules, "megatron.core.writer")
    ours, plain = tmp_path / "ours", tmp_path / "plain"
    assert main(["from-megatron-core", "--load", str(source), "--save", str(ours)]) == 0
    whole = core[0] / "0" / "iter_0000002"
    assert main(["from-megatron-core", "--load", str(whole), "--save", str(plain)]) == 0
    found, expected = (
        json.loads((root / "iter_0000002" / CHECKSUM_FILE).read_text())["files"] for root in (ours, plain)
    )
    assert found.keys() == expected.keys() and len(found) > 2
    for name in found.keys() - {METADATA_FILE}:
        assert found[name] == expected[name], name


def test_a_released_model_and_an_iteration_by_number(
    core: tuple[Path, dict[str, list[float]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = core[0] / "0" / "iter_0000002"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release\n")
    (tmp_path / "release").symlink_to(whole)
    (tmp_path / "iter_0000007").symlink_to(whole)
    words = ["from-megatron-core", "--load", str(tmp_path)]
    assert main([*words, "--save", str(tmp_path / "a")]) == 0
    assert main([*words, "--save", str(tmp_path / "b"), "--ckpt-step", "7", "--no-load-optim"]) == 0
    assert main([*words, "--save", str(tmp_path / "c"), "--ckpt-step", "8"]) == 2
    assert f"--ckpt-step 8: {tmp_path} holds no iter_0000008" in capsys.readouterr().err
    assert read_record(tmp_path / "a", 2).has_optimizer
    assert not read_record(tmp_path / "b", 2).has_optimizer


def test_buckets_of_an_optimizer_are_refused_or_left(
    core: tuple[Path, dict[str, list[float]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "theirs"
    checkpoint = open_checkpoint(core[0] / "0" / "iter_0000002")
    weights = {key: checkpoint.read(checkpoint.find(name)) for name, key in checkpoint.names[""].items()}
    bucket = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_0.bucket_idx_0.exp_avg"
    dcp.save({**weights, bucket: torch.zeros(64)}, checkpoint_id=source, no_dist=True)
    shutil.copy(checkpoint.directory / "common.pt", source)
    words = ["from-megatron-core", "--load", str(source), "--save", str(tmp_path / "ours")]
    assert main(words) == 2
    assert "stored by buckets of one layout" in capsys.readouterr().err
    assert main([*words, "--no-load-optim"]) == 0
