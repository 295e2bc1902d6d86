"""Command lines as users of Megatron-LM write them: dense ones run, others resolve and are refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.models.config import ModelConfig
from megatron.models.presets import preset_flags, with_preset
from megatron.train import main
from megatron.train.arguments import batch_schedule, parse_args, validate
from megatron.train.errors import is_users

LOGS = (
    "--log-params-norm --log-num-zeros-in-grad --log-validation-ppl-to-tensorboard --log-timers-to-tensorboard "
    "--log-memory-to-tensorboard --tensorboard-dir tb --log-interval 1 --timing-log-level 0 --log-throughput"
)
DATA = (
    "--data-path corpus_text_document --vocab-file vocab.json --merge-file merges.txt --split 949,50,1 "
    "--data-cache-path cache"
)
CHECKPOINTS = (
    "--save out --load out --save-interval 50 --ckpt-format torch_dist --dist-ckpt-strictness log_all --async-save "
    "--use-persistent-ckpt-worker --dist-ckpt-optim-fully-reshardable --ckpt-assume-constant-structure"
)
SMALL = (
    "--num-layers 12 --hidden-size 512 --num-attention-heads 8 --micro-batch-size 4 --global-batch-size 32 "
    "--seq-length 1024 --max-position-embeddings 1024 --train-iters 100 --lr-decay-iters 320000 --lr 0.00015 "
    "--lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 1e-2 --clip-grad 1.0 --lr-warmup-fraction .01 "
    "--eval-interval 1000 --eval-iters 10 --transformer-impl transformer_engine --distributed-backend nccl "
    "--use-mcore-models --deterministic-mode --attention-softmax-in-fp32 --no-gradient-accumulation-fusion "
    f"--attention-backend unfused {LOGS} {DATA} {CHECKPOINTS}"
)
DENSE = {
    "distributed optimizer": "--bf16 --use-distributed-optimizer --no-mmap-bin-files",
    "overlap": "--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "fsdp2": "--fp16 --use-torch-fsdp2 --apply-query-key-layer-scaling --use-checkpoint-opt_param-scheduler",
    "megatron fsdp": "--bf16 --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
    "--megatron-fsdp-grad-comm-dtype bf16",
    "recompute": "--bf16 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "tensor": "--bf16 --tensor-model-parallel-size 4 --sequence-parallel --no-rope-fusion --swiglu "
    "--position-embedding-type rope --normalization RMSNorm --disable-bias-linear --no-bias-gelu-fusion",
    "context": "--bf16 --context-parallel-size 2 --cp-comm-type a2a --attention-dropout 0 --calculate-per-token-loss "
    "--no-check-for-nan-in-loss-and-grad --cross-entropy-loss-fusion --cross-entropy-fusion-impl te",
    "rerun off": "--bf16 --rerun-mode disabled --manual-gc --manual-gc-interval 10",
}


@pytest.mark.parametrize("words", DENSE.values(), ids=DENSE.keys())
def test_dense_runs_are_accepted(words: str) -> None:
    config = validate(parse_args(f"{SMALL} {words}".split()), 8, "cpu")
    assert config.tokenizer_type == "GPT2BPETokenizer"
    assert (config.distributed_backend, config.transformer_impl) == ("gloo", "local")
    assert config.num_microbatches * config.micro_batch_size * config.data_parallel_size == 32


@pytest.mark.parametrize(("world_size", "expected"), [("8", 8), (None, 1)])
def test_validate_only_prints_the_configuration_and_starts_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], world_size: str | None, expected: int
) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    if world_size is not None:
        monkeypatch.setenv("WORLD_SIZE", world_size)
    main.main([*SMALL.split(), "--bf16", "--validate-only", "--sequence-parallel"])
    streams = capsys.readouterr()
    printed = json.loads(streams.out)
    assert "--sequence-parallel" in streams.err  # the warnings of a start are there, beside the JSON
    assert (printed["world_size"], printed["data_parallel_size"]) == (expected, expected)
    assert printed["num_microbatches"] * expected == 8
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--num-layrs 4", "did you mean --num-layers"),
        ("--moe-latent-size 8", "--moe-latent-size 8 is not supported"),
    ],
)
def test_a_wrong_command_line_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, expected: str
) -> None:
    monkeypatch.setattr("os._exit", sys.exit)
    with pytest.raises(SystemExit) as ended:
        main.main([*SMALL.split(), *words.split()])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1


def test_a_long_run_with_rampup() -> None:
    words = (
        "--distributed-timeout-minutes 60 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 1 "
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --use-mcore-models "
        "--sequence-parallel --disable-bias-linear --micro-batch-size 4 --rampup-batch-size 384 384 97656250 "
        "--global-batch-size 1152 --train-samples 19531250 --manual-gc --transformer-impl transformer_engine "
        "--tokenizer-type GPTSentencePieceTokenizer --tokenizer-model t.model --data-path blend --split 99,1,0 "
        "--no-mmap-bin-files --num-workers 6 --apply-layernorm-1p --untie-embeddings-and-output-weights "
        "--position-embedding-type rope --no-rope-fusion --rotary-percent 0.5 --squared-relu --num-layers 32 "
        "--hidden-size 6144 --num-attention-heads 48 --group-query-attention --num-query-groups 8 "
        "--seq-length 4096 --max-position-embeddings 4096 --attention-dropout 0.0 --hidden-dropout 0.0 "
        "--lr-decay-samples 1949218748 --lr-warmup-samples 3906252 --lr 4.5e-4 --min-lr 4.5e-5 "
        "--decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5 --lr-decay-style cosine --adam-beta2 0.95 "
        "--eval-iters 32 --eval-interval 2000 --save out --load out --save-interval 5000 "
        "--save-retain-interval 10000 --init-method-std 0.0134 --bf16 --exit-interval 10200 "
        f"--wandb-project p --wandb-entity e --wandb-exp-name n --wandb-save-dir d {LOGS}"
    )
    config = validate(parse_args(words.split()), 64, "cpu")
    assert (config.data_parallel_size, config.num_query_groups, config.ffn_hidden_size) == (8, 8, 24576)
    # Two increments of 384: the first half of the ramp at 384, the second at 768, then 1152.
    schedule = batch_schedule(config)
    assert [schedule.at(n) for n in (0, 48828124, 48828125, 97656249, 97656250)] == [384, 384, 768, 768, 1152]
    assert config.train_iters == 19531250 // 384  # the samples end within the first half


def test_a_deepseek_run_resolves() -> None:
    words = (
        f"{SMALL} --bf16 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1 --use-megatron-fsdp "
        "--megatron-fsdp-version 2 --num-distributed-optimizer-instances 2 --outer-dp-sharding-strategy optim "
        "--num-layers 8 --ffn-hidden-size 2048 --kv-channels 128 --position-embedding-type rope --swiglu "
        "--normalization RMSNorm --norm-epsilon 1e-6 --untie-embeddings-and-output-weights "
        "--multi-latent-attention --qk-layernorm --num-experts 8 --moe-layer-freq ([0]*3+[1]*5) "
        "--moe-ffn-hidden-size 1024 --moe-shared-expert-intermediate-size 1024 "
        "--moe-router-load-balancing-type seq_aux_loss --moe-router-topk 4 --moe-token-dispatcher-type alltoall "
        "--moe-router-pre-softmax --moe-grouped-gemm --moe-aux-loss-coeff 1e-4 --moe-router-group-topk 2 "
        "--moe-router-num-groups 4 --moe-router-topk-scaling-factor 2.0 --moe-router-score-function sigmoid "
        "--moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3 --moe-router-dtype fp32 "
        "--moe-permute-fusion --q-lora-rank 256 --kv-lora-rank 128 --qk-head-dim 128 --qk-pos-emb-head-dim 64 "
        "--v-head-dim 128 --rotary-scaling-factor 1.0 --mscale 1.0 --mscale-all-dim 1.0"
    )
    arguments = parse_args(words.split())
    config = validate(arguments, 8, "cpu")
    assert config.moe_layer_freq == (0, 0, 0, 1, 1, 1, 1, 1)
    assert (config.moe_router_load_balancing_type, config.moe_aux_loss_coeff) == ("seq_aux_loss", 1e-4)
    assert (config.sharding_strategy, config.outer_sharding_strategy) == ("optim_grads_params", "optim")
    model = ModelConfig.from_arguments(validate(arguments, 8, "cpu").replace(vocab_size=8))
    assert model.moe is not None and model.mla is not None and model.mtp is None
    assert (model.moe.pattern[2:4], model.moe.score_function, model.mla.q_lora_rank) == (
        (False, True),
        "sigmoid",
        256,
    )


def test_the_preset_of_a_model_with_experts() -> None:
    """Both spellings; twice, without a name and an unknown one are one line."""

    def words(given: list[str]) -> list[str]:
        return with_preset(given, "deepseek-v3-tiny")

    tiny = preset_flags("deepseek-v3-tiny")
    assert words(["--lr", "1"]) == [*tiny, "--lr", "1"]
    for given in (["--preset", "mixtral-8x7b"], ["--preset=mixtral-8x7b"]):
        assert words([*given, "--lr", "1"]) == [*preset_flags("mixtral-8x7b"), "--lr", "1"]
    for own in (
        ["--num-layers", "61"],
        ["--num-layers=61"],
        ["--use-checkpoint-args"],
        ["--yaml-cfg", "a.yaml"],
    ):
        assert words([*own, "--lr", "1"]) == [*own, "--lr", "1"], (
            "another model's sizes beside the user's own"
        )
        assert words([*own, "--preset", "deepseek-v3-tiny"]) == [*tiny, *own]
    for wrong, message in (
        (["--preset", "a", "--preset=b"], "--preset a and --preset b: give one preset"),
        (["--preset"], "--preset needs a name"),
        (["--preset", "--lr", "1"], "--preset needs a name"),
        (["--preset=none"], "none"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            words(wrong)
        assert is_users(caught.value)


def test_flags_of_the_tiny_deepseeks_script_may_stand_without_a_folder(tmp_path: Path) -> None:
    """The script up to where it starts processes, with a stand-in for Python."""
    script = Path(__file__).resolve().parents[3] / "scripts" / "pretrain_deepseek_tiny.sh"
    text = script.read_text().replace("ensure_environment run", "PYTHON=echo")
    copy = tmp_path / "scripts" / script.name
    copy.parent.mkdir()
    copy.write_text(text)
    (copy.parent / "env.sh").write_text(f"REPOSITORY_ROOT={tmp_path}\n")
    for folder, words in (("runs/deepseek_tiny", ()), ("there", (str(tmp_path / "there"),))):
        done = subprocess.run(
            ["bash", str(copy), *words, "--expert-model-parallel-size", "4"], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        last = done.stdout.splitlines()[-1]
        assert last.endswith("--expert-model-parallel-size 4") and f"{tmp_path}/{folder}/cache" in last


@pytest.mark.parametrize(
    ("script", "words", "message"),
    [
        (
            "pretrain_gpt_345m.sh",
            ["--train-iters", "3"],
            "--train-iters: give DATA and TOKENIZER, or mock, before flags",
        ),
        ("pretrain_gpt_345m.sh", ["text_document"], "text_document: give its TOKENIZER too"),
        ("quickstart.sh", ["--train-iters"], "takes a folder and no flags, not --train-iters"),
    ],
)
def test_scripts_refuse_a_flag_in_place_of_a_path(script: str, words: list[str], message: str) -> None:
    path = Path(__file__).resolve().parents[3] / "scripts" / script
    done = subprocess.run(["bash", str(path), *words], capture_output=True, text=True)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1
