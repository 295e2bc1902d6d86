"""What a user may do wrong: one line that names file and cause, and nothing is written or overwritten."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron.tools.convert.command import main
from megatron.tools.generate_text import main as generate
from megatron.train.checkpoint import CHECKSUM_FILE, MARKER
from tests.unit.tools.convert.models import build, change_config, rewrite, save, with_prediction_layer

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("llama"), tmp_path_factory.mktemp("llama") / "theirs")


@pytest.fixture(scope="module")
def ours(llama: Path) -> Path:
    folder = llama.with_name("ours")
    assert main(["from-hugging-face", "--load", str(llama), "--save", str(folder)]) == 0
    return folder


def fails(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one line of a command that fails."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1 and text.startswith("convert_checkpoint: ")
    return text


def missing_tensor(folder: Path) -> str:
    change_config(folder, num_hidden_layers=3)
    return "model.layers.2.input_layernorm.weight"


def more_tensors(folder: Path) -> str:
    change_config(folder, num_hidden_layers=1)
    return f"{folder}/model.safetensors: model.layers.1.input_layernorm.weight"


def other_shape(folder: Path) -> str:
    change_config(folder, intermediate_size=48)
    return (
        f"{folder}/model.safetensors: model.layers.0.mlp.gate_proj.weight has shape [40, 32], but config.json means "
        "[48, 32]"
    )


def unknown_family(folder: Path) -> str:
    change_config(folder, model_type="gpt_bigcode")
    return (
        f"{folder}/config.json: model_type 'gpt_bigcode' is unknown: only deepseek_v3, gpt2, llama, mixtral,"
    )


def bias(folder: Path) -> str:
    change_config(folder, attention_bias=True)
    return f"{folder}/config.json: attention_bias is True"


def other_rope(folder: Path) -> str:
    change_config(folder, rope_parameters={"rope_type": "longrope", "rope_theta": 1.0})
    return f"{folder}/config.json: rope_type 'longrope' is not supported"


def no_size(folder: Path) -> str:
    change_config(folder, hidden_size=None)
    return f"{folder}/config.json: hidden_size is missing"


def impossible_size(folder: Path) -> str:
    change_config(folder, num_key_value_heads=3)
    return "--num-attention-heads 4 is not a multiple of --num-query-groups 3"


def quantized(folder: Path) -> str:
    change_config(folder, quantization_config={"quant_method": "fp8"})
    return f"{folder}/config.json: the weights are quantized"


def no_json(folder: Path) -> str:
    (folder / "config.json").write_text("{")
    return f"{folder}/config.json cannot be read (JSONDecodeError"


def no_config(folder: Path) -> str:
    (folder / "config.json").unlink()
    return f"{folder}/config.json is missing"


def integers(folder: Path) -> str:
    other = rewrite(folder, folder.with_name("x"), {"model.norm.weight": torch.ones(32, dtype=torch.int8)})
    shutil.copy(other / "model.safetensors", folder)
    return f"{folder}/model.safetensors: model.norm.weight is torch.int8"


SOURCES = (
    missing_tensor,
    more_tensors,
    other_shape,
    unknown_family,
    bias,
    other_rope,
    no_size,
    impossible_size,
    quantized,
    no_json,
    no_config,
    integers,
)


@pytest.mark.parametrize("damage", SOURCES, ids=lambda damage: damage.__name__)
def test_a_source_that_cannot_be_converted(
    damage: Callable[[Path], str], llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = shutil.copytree(llama, tmp_path / "theirs")
    words = damage(source)
    assert words in fails(capsys, "from-hugging-face", "--load", source, "--save", tmp_path / "ours")
    assert not (tmp_path / "ours").exists() and not list(tmp_path.glob("*partial*"))


def test_a_prediction_layer_with_an_embedding_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = save(build("deepseek_v3"), tmp_path / "plain")
    whole = with_prediction_layer(plain, tmp_path / "theirs", build("deepseek_v3", num_hidden_layers=3))
    other = rewrite(whole, tmp_path / "other", {"model.layers.2.embed_tokens.weight": torch.zeros(61, 32)})
    text = fails(capsys, "from-hugging-face", "--load", other, "--save", tmp_path / "ours")
    assert "model.layers.2.embed_tokens.weight is not the same as model.embed_tokens.weight" in text


def test_nothing_is_overwritten(
    llama: Path, ours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "precious").write_text("x")
    for command, load in (("from-hugging-face", llama), ("to-hugging-face", ours)):
        text = fails(capsys, command, "--load", load, "--save", tmp_path / "there")
        assert f"--save {tmp_path / 'there'} exists: give a new folder" in text
    assert [path.name for path in tmp_path.rglob("*")] == ["there", "precious"]


def test_a_checkpoint_that_cannot_be_exported(
    llama: Path, ours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No checkpoint; a model that no family has; another model's folder; a damaged checkpoint."""
    words = ("--save", tmp_path / "back")
    assert "holds no latest_checkpointed" in fails(capsys, "to-hugging-face", "--load", tmp_path, *words)
    like = shutil.copytree(llama, tmp_path / "like")
    change_config(like, rms_norm_eps=1e-5)
    text = fails(capsys, "to-hugging-face", "--load", ours, *words, "--like", like)
    assert "is another model: of ours and its, layernorm_epsilon 1e-06, 1e-05" in text
    copy = shutil.copytree(ours, tmp_path / "copy")
    (copy / "iter_0000000" / CHECKSUM_FILE).unlink()
    run_file = copy / "iter_0000000/run.json"
    record = json.loads(run_file.read_text())
    for field, value in (("activation", "gelu"), ("normalization", "LayerNorm")):
        run_file.write_text(json.dumps({**record, "model": {**record["model"], field: value}}))
        text = fails(capsys, "to-hugging-face", "--load", copy, *words)
        assert "the model is no llama" in text and f"{field} {value}" in text
    run_file.write_text(json.dumps({**record, "model": {**record["model"], "num_layers": 3}}))
    text = fails(capsys, "to-hugging-face", "--load", copy, *words)
    assert "lacks model.decoder.layers.2.mlp.linear_fc1.layer_norm_weight" in text
    run_file.write_text(json.dumps(record))
    data = max(copy.glob("iter_0000000/*.distcp"), key=lambda path: path.stat().st_size)
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    assert "iter_0000000" in fails(capsys, "to-hugging-face", "--load", copy, *words)
    assert not (tmp_path / "back").exists() and not list(tmp_path.glob("*partial*"))


def test_damage_is_found_before_an_export(
    ours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A flipped bit, which torch loads without a word: one line, or the newest whole checkpoint before it."""
    copy = shutil.copytree(ours, tmp_path / "copy")
    shutil.copytree(copy / "iter_0000000", copy / "iter_0000003")
    (copy / MARKER).write_text("3")
    data = max(copy.glob("iter_0000003/*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 0x40
    data.write_bytes(content)
    for words in (("--load", copy, "--ckpt-step", 3), ("--load", data.parent)):
        assert f"{data} is damaged" in fails(capsys, "to-hugging-face", *words, "--save", tmp_path / "back")
    assert generate(["--load", str(copy), "--ckpt-step", "3"]) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1 and f"{data} is damaged" in text
    assert not (tmp_path / "back").exists()
    for name, load in (("one", copy), ("other", copy / "iter_0000000")):
        assert main(["to-hugging-face", "--load", str(load), "--save", str(tmp_path / name)]) == 0
        assert (f"{data} is damaged" in capsys.readouterr().err) == (name == "one")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "other")]
    assert weights[0] == weights[1]


def test_sizes_of_files(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["to-hugging-face", "--load", "a", "--save", "b", "--max-file-size", "5 apples"])
    assert "'5 apples' is no size such as 5GB or 500MB" in capsys.readouterr().err
