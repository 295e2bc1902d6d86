"""Hugging Face -> ours -> Hugging Face, byte for byte; what is loaded into a run gives transformers' logits."""

from __future__ import annotations

import filecmp
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from megatron.models.block import AttentionInputs
from megatron.tools.convert.command import main
from megatron.tools.convert.records import checkpoint_key, model_of
from megatron.tools.convert.safetensors_file import read_folder, read_tensor
from megatron.train.arguments import parse_args, validate
from megatron.train.arguments.saved import complete_from_checkpoint
from megatron.train.build import Run, build_run
from megatron.train.checkpoint import load_tensors, read_record
from megatron.train.initialize import Launch, seed_everything
from megatron.train.resume import load_run
from tests.pool import run_ranks
from tests.unit.models.helpers import build_gpt, relative_error
from tests.unit.tools.convert.models import build, change_config, save, with_prediction_layer

pytestmark = pytest.mark.filterwarnings("ignore")
FAMILIES = ("llama", "llama_tied", "qwen3", "mixtral", "qwen3_moe", "deepseek_v3")


def convert(*words: str | Path) -> None:
    assert main([str(word) for word in words]) == 0


def same_files(first: Path, second: Path) -> bool:
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in second.iterdir())
    return filecmp.cmpfiles(first, second, names, shallow=False)[0] == names


@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_is_the_same_bytes(family: str, tmp_path: Path) -> None:
    """With --like every file; without, the tensors, and a config.json that means the same to transformers."""
    import transformers

    dtype = torch.bfloat16 if family in ("qwen3", "mixtral") else torch.float32
    model = build(family, dtype)
    source = save(model, tmp_path / "theirs", max_shard_size="40KB" if family != "llama_tied" else "5GB")
    assert (source / "model.safetensors.index.json").exists() == (family != "llama_tied")
    convert("from-hugging-face", "--load", source, "--save", tmp_path / "ours")
    convert("to-hugging-face", "--load", tmp_path / "ours", "--save", tmp_path / "like", "--like", source)
    assert same_files(source, tmp_path / "like")

    convert(
        "to-hugging-face",
        "--load",
        tmp_path / "ours",
        "--save",
        tmp_path / "plain",
        "--max-file-size",
        "60KB",
    )
    before, after = read_folder(source), read_folder(tmp_path / "plain")
    assert before.keys() == after.keys()
    for name, info in before.items():
        assert info.dtype == after[name].dtype and torch.equal(read_tensor(info), read_tensor(after[name]))
    tokens = torch.arange(20).view(1, 20) * 3 % 61
    with torch.no_grad():  # both from files: a model cast to bf16 has rounded its frequencies too
        first, second = (
            transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
            .eval()(tokens)
            .logits
            for folder in (source, tmp_path / "plain")
        )
    assert torch.equal(first, second)


def test_dtype_rounds_weights_and_not_the_expert_bias(tmp_path: Path) -> None:
    source = save(build("deepseek_v3"), tmp_path / "theirs")
    convert("from-hugging-face", "--load", source, "--save", tmp_path / "ours")
    convert("to-hugging-face", "--load", tmp_path / "ours", "--save", tmp_path / "back", "--dtype", "bf16")
    before, after = read_folder(source), read_folder(tmp_path / "back")
    for name, info in before.items():
        kept = name.endswith("e_score_correction_bias")
        dtype = torch.float32 if kept else torch.bfloat16
        assert torch.equal(read_tensor(after[name]), read_tensor(info).to(dtype))
    assert json.loads((tmp_path / "back/config.json").read_text())["torch_dtype"] == "bfloat16"


def load(rank: int, world: int, folder: Path, layout: str) -> Run:
    """A run that knows of its model no more than --load and --use-checkpoint-args."""
    words = (
        f"--load {folder} --use-checkpoint-args --mock-data --tokenizer-type NullTokenizer --vocab-size 60 "
        "--micro-batch-size 1 --seq-length 32 --lr 0.1 "
        f"--train-iters 1 --num-workers 0 --attention-dropout 0 --hidden-dropout 0 --use-megatron-fsdp {layout}"
    )
    arguments, _ = complete_from_checkpoint(parse_args(words.split()))
    config = validate(arguments, world, "cpu")
    seed_everything(config.seed)
    run = build_run(config, Launch(rank, world, rank, world), torch.device("cpu"))
    progress, _ = load_run(run)
    assert progress.iteration == 0
    return run


def logits_of_runs(
    rank: int, world: int, jobs: list[tuple[Path, str]], tokens: torch.Tensor
) -> list[torch.Tensor]:
    """This rank's columns, for each checkpoint."""
    found = []
    for folder, layout in jobs:
        model = load(rank, world, folder, layout).state.model
        model.eval()
        with torch.no_grad():
            found.append(model(tokens=tokens).clone())
    return found


def test_a_run_that_loads_it_has_their_logits(tmp_path: Path) -> None:
    """Two ranks: tensor parallel (the vocabulary of 61 is padded), ZeRO-3, expert parallel."""
    layouts = {
        "llama": "--tensor-model-parallel-size 2",
        "llama_tied": "--tensor-model-parallel-size 2 --sequence-parallel",
        "qwen3": "--data-parallel-sharding-strategy optim_grads_params",
        "mixtral": "--expert-model-parallel-size 2 --data-parallel-sharding-strategy optim_grads_params",
        "qwen3_moe": "--tensor-model-parallel-size 2",
        "deepseek_v3": "--expert-model-parallel-size 2 --data-parallel-sharding-strategy optim",
    }
    tokens = torch.arange(20).view(1, 20) * 3 % 61
    jobs, theirs = [], []
    for family, layout in layouts.items():
        model = build(family)
        folder = save(model, tmp_path / family)
        convert("from-hugging-face", "--load", folder, "--save", tmp_path / f"{family}-ours")
        jobs.append((tmp_path / f"{family}-ours", layout))
        with torch.no_grad():
            theirs.append(model(tokens).logits)
    results = run_ranks(logits_of_runs, 2, jobs, tokens, timeout=300)
    for index, (family, layout) in enumerate(layouts.items()):
        ours = results[0][index]
        if "tensor" in layout:
            ours = torch.cat([result[index] for result in results], dim=-1)
        assert torch.all(ours[..., 61:] == float("-inf"))
        assert relative_error(ours[..., :61], theirs[index]) < 1e-5, family


def prediction_of(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of the first prediction layer of a checkpoint's model: [b, s - 1, vocabulary]."""
    config = model_of(read_record(folder, 0).model)
    model = build_gpt(config.replace(padded_vocab_size=config.vocab_size)).eval()
    whole = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    load_tensors(folder, 0, {checkpoint_key(name): tensor.detach() for name, tensor in whole.items()})
    with torch.no_grad():
        positions = torch.arange(tokens.shape[1] - 1).expand(tokens.shape[0], -1)
        inputs = AttentionInputs(model._rotary(positions, torch.float32))
        hidden = model.decoder(model.embedding(tokens[:, :-1], positions), inputs)
        hidden = model.mtp.layers[0](model.embedding(tokens[:, 1:], positions), hidden, inputs)
        return model.output_layer(hidden).transpose(0, 1)


def test_prediction_layer_of_deepseek(tmp_path: Path) -> None:
    """Its layer is a layer of transformers; what is around it follows DeepSeek-V3's paper, equations 21 to 23."""
    two, three = build("deepseek_v3"), build("deepseek_v3", num_hidden_layers=3)
    folder = with_prediction_layer(save(two, tmp_path / "plain"), tmp_path / "theirs", three)
    convert("from-hugging-face", "--load", folder, "--save", tmp_path / "ours")
    convert("to-hugging-face", "--load", tmp_path / "ours", "--save", tmp_path / "like", "--like", folder)
    assert same_files(folder, tmp_path / "like")
    convert("to-hugging-face", "--load", tmp_path / "ours", "--save", tmp_path / "plainly")
    assert read_folder(tmp_path / "plainly").keys() == read_folder(folder).keys()

    tokens = torch.arange(17).view(1, 17) * 3 % 61
    own = {name: read_tensor(info) for name, info in read_folder(folder).items()}
    with torch.no_grad():
        hidden = two.model(tokens[:, :-1]).last_hidden_state
        embedded = two.model.embed_tokens(tokens[:, 1:])

        def norm(x: torch.Tensor, name: str) -> torch.Tensor:
            return F.rms_norm(x, x.shape[-1:], own[f"model.layers.2.{name}.weight"], 1e-6)

        joined = torch.cat((norm(embedded, "enorm"), norm(hidden, "hnorm")), -1)
        states = joined @ own["model.layers.2.eh_proj.weight"].t()
        mask = torch.full((16, 16), float("-inf")).triu(1)[None, None]
        positions = torch.arange(16)[None]
        rotary = three.model.rotary_emb(states, positions)
        states = three.model.layers[2](
            states, attention_mask=mask, position_ids=positions, position_embeddings=rotary
        )
        states = states[0] if isinstance(states, tuple) else states
        expected = norm(states, "shared_head.norm") @ own["lm_head.weight"].t()
    assert relative_error(prediction_of(tmp_path / "ours", tokens), expected) < 1e-5


def test_older_config_files_mean_the_same(tmp_path: Path) -> None:
    """rope_theta and rope_scaling of transformers before 5."""
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 8192
    source = save(build("llama"), tmp_path / "theirs")
    change_config(source, rope_parameters={**rope, "rope_theta": 5000.0})
    convert("from-hugging-face", "--load", source, "--save", tmp_path / "first")
    change_config(source, rope_parameters=None, rope_theta=5000.0, rope_scaling=rope)
    convert("from-hugging-face", "--load", source, "--save", tmp_path / "second")
    first, second = (
        json.loads((tmp_path / name / "iter_0000000/run.json").read_text())["model"]
        for name in ("first", "second")
    )
    assert first == second
    assert first["rotary"]["base"] == 5000 and first["rotary"]["scaling_factor"] == 8.0
