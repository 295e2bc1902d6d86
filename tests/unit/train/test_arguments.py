"""Parsing and validation: what the user gave, what follows, and one clear line when it cannot be."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron.train.arguments import batch_schedule, model_config_from, parse_args, validate
from megatron.train.arguments.batch import BatchSchedule, parse_steps
from megatron.train.arguments.tables import flags_by_dest
from megatron.train.arguments.validate import check_and_resolve
from megatron.train.arguments.yaml_keys import CONFIG_KEYS
from megatron.train.config import TrainConfig

MODEL = "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --micro-batch-size 2"
RUN = f"{MODEL} --train-iters 10 --lr 1e-3 --mock-data --tokenizer-type ByteLevelTokenizer"


def config(words: str = "", world_size: int = 1, base: str = RUN, device: str = "cpu") -> TrainConfig:
    return validate(parse_args(f"{base} {words}".split()), world_size, device)


def later(words: str, world_size: int = 1, base: str = RUN) -> TrainConfig:
    """Without refusals: for the rules of what is refused."""
    return check_and_resolve(parse_args(f"{base} {words}".split()), world_size)


def refused(words: str, world_size: int = 1, base: str = RUN, resolve: Any = later) -> str:
    with pytest.raises(ValueError) as caught:
        resolve(words, world_size, base)
    message = str(caught.value)
    assert "\n" not in message
    return message


# parsing


def test_unknown_flags_are_errors_with_the_nearest_name() -> None:
    for words, near in (
        ("--nmu-layers 4", "--num-layers"),
        ("--num_layers 4", "--num-layers"),
        ("--tensor-parallel-size 2", "--tensor-model-parallel-size"),
        ("--use-distributed-optimiser", "--use-distributed-optimizer"),
    ):
        with pytest.raises(ValueError, match=f"unknown flag {words.split()[0]}: did you mean {near}"):
            parse_args(words.split())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--lr fast", "--lr: invalid float value: 'fast'"),
        ("--num-layers", "--num-layers: expected one argument"),
        ("--lr-decay-style square", "--lr-decay-style: invalid choice: 'square'"),
        ("stray", "unexpected value 'stray'"),
        ("--exit-signal SIGNOTHING", "--exit-signal"),
        ("--moe-layer-freq [1]*x", "--moe-layer-freq"),
        ("--moe-layer-freq __import__('os').getcwd()[0]", "--moe-layer-freq"),
    ],
)
def test_wrong_words(words: str, expected: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_args(words.split())
    assert expected in str(caught.value)


def test_values_of_special_types() -> None:
    parsed = parse_args(
        ["--moe-layer-freq", "([0]*3+[1]*5)", "--window-size", "(128,0)", "--linear-attention-freq", "4"]
    )
    assert parsed.moe_layer_freq == [0, 0, 0, 1, 1, 1, 1, 1]
    assert parsed.window_size == (128, 0)
    assert parsed.linear_attention_freq == 4
    assert parse_args(["--exit-signal", "SIGUSR2"]).exit_signal.name == "SIGUSR2"
    assert parse_args(["--rl-profile"]).rl_profile is True
    assert parse_args(["--no-rl-partial-rollouts"]).rl_partial_rollouts is False


def test_aliases_share_a_destination() -> None:
    assert parse_args(["--persistent-save-interval", "7"]).save_interval == 7
    assert parse_args(["--use-checkpoint-opt-param-scheduler"]).use_checkpoint_opt_param_scheduler is True
    assert parse_args(["--apply-layernorm-1p"]).layernorm_zero_centered_gamma is True
    assert parse_args(["--norm-epsilon", "1e-6"]).layernorm_epsilon == 1e-6


def test_presets_are_defaults_and_explicit_flags_win() -> None:
    parsed = parse_args(["--num-layers", "3"], {"num_layers": 61, "hidden_size": 7168})
    assert (parsed.num_layers, parsed.hidden_size) == (3, 7168)
    assert parsed.explicit == {"num_layers"}
    with pytest.raises(ValueError, match="hiden_size"):
        parse_args([], {"hiden_size": 1})


def test_defaults_are_not_shared() -> None:
    parse_args([]).cp_comm_type.append("a2a")
    assert parse_args([]).cp_comm_type == ["p2p"]


def test_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_args(["--help"])
    assert ended.value.code == 0
    assert "--tensor-model-parallel-size" in capsys.readouterr().out


# YAML


def test_yaml_says_the_same_as_words(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "model_parallel:\n  tensor_model_parallel_size: 2\n  bf16: true\n"
        "language_model:\n  num-layers: 4\n  layernorm_epsilon: 1.0e-6\n  add_bias_linear: false\n"
        "micro_batch_size: 2\nlr: 0.001\nsplit: 9,1,0\nswiglu: false\ndata_path: [0.5, a, 0.5, b]\n"
        "cp_comm_type: [p2p]\nclip_grad: 1.0\nrope_scaling_factor: 4\n"
    )
    parsed = parse_args(["--yaml-cfg", str(path), "--num-layers", "8"])
    words = (
        f"--yaml-cfg {path} --tensor-model-parallel-size 2 --bf16 --num-layers 8 --norm-epsilon 1e-6 "
        "--disable-bias-linear --micro-batch-size 2 --lr 0.001 --split 9,1,0 --data-path 0.5 a 0.5 b "
        "--rope-scaling-factor 4"
    )
    assert vars(parsed) == vars(parse_args(words.split()))


def test_yaml_takes_the_fields_of_megatrons_example(tmp_path: Path) -> None:
    """Those that are no flags of their own: what asks for nothing is nothing, what has a flag is that flag."""
    path = tmp_path / "run.yaml"
    path.write_text(
        "language_model:\n  activation_func: swiglu\n  gated_linear_unit: false\n  init_method: null\n"
        "  persist_layer_norm: false\n  num_moe_experts: null\n  num_query_groups: null\n  moe_token_dropping: false\n"
        "  layernorm_zero_centered_gamma: true\n  bias_activation_fusion: true\n"
        "model_parallel:\n  params_dtype: null\n  finalize_model_grads_func: null\n  enable_autocast: false\n"
        "  batch_p2p_comm: true\n  cpu_offloading: false\n  virtual_pipeline_model_parallel_size: null\n"
        "  fp8_param: false\nuse_legacy_models: false\nretriever_seq_length: 256\ndelay_grad_reduce: true\n"
    )
    expected = parse_args(f"--swiglu --no-persist-layer-norm --apply-layernorm-1p --yaml-cfg {path}".split())
    assert vars(parse_args(["--yaml-cfg", str(path)])) == vars(expected)


def test_every_field_of_a_configuration_has_a_value_that_asks_for_nothing(tmp_path: Path) -> None:
    empty, full = tmp_path / "empty.yaml", tmp_path / "full.yaml"
    empty.write_text("")
    full.write_text("".join(f"{key}: null\n" for key in CONFIG_KEYS))
    parsed = [vars(parse_args(["--yaml-cfg", str(path)])) for path in (empty, full)]
    assert {**parsed[0], "yaml_cfg": None} == {**parsed[1], "yaml_cfg": None}
    for key, field in CONFIG_KEYS.items():
        assert key not in flags_by_dest() and field.words(key, None) == []
        for words in field.values.values():
            parse_args(list(words))
        with pytest.raises(ValueError, match=f"{key}: other cannot be had: "):
            field.words(key, "other")


def test_yaml_takes_flags_by_name(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "MODEL_ARGS:\n  --num-layers: 12\n  --no-mmap-bin-files: true\n  --use-mcore-models: true\n"
        "  --no-bias-gelu-fusion: false\n  --moe-layer-freq: ([0]*3+[1]*5)\n  --lr: 1.0e-4\n  --min-lr: 1e-5\n"
    )
    words = "--num-layers 12 --no-mmap-bin-files --use-mcore-models --moe-layer-freq ([0]*3+[1]*5) --lr 1e-4"
    expected = parse_args([*words.split(), "--min-lr", "1e-5", "--yaml-cfg", str(path)])
    assert vars(parse_args(["--yaml-cfg", str(path)])) == vars(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("num_layrs: 4", "unknown key 'num_layrs': did you mean 'num_layers'"),
        ("num_layers: four", "--num-layers: invalid int value: 'four'"),
        ("bf16: 3", "bf16: --bf16 takes true or false, not 3"),
        ("activation_func: relu", "activation_func: relu cannot be had: use swiglu"),
        ("virtual_pipeline_model_parallel_size: 2", "use num_virtual_stages_per_pipeline_rank"),
        ("- a\n- b", "must be a mapping"),
        ("a: [", "not valid YAML"),
        ("lr_decay_style: square", "--lr-decay-style: invalid choice"),
    ],
)
def test_bad_yaml_is_one_line(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        parse_args(["--yaml-cfg", str(path)])
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_missing_yaml(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--yaml-cfg .*nowhere.yaml: No such file"):
        parse_args(["--yaml-cfg", str(tmp_path / "nowhere.yaml")])


# the configuration


def test_configuration_is_frozen_and_travels() -> None:
    made = config("--data-cache-path x")
    with pytest.raises(AttributeError, match="frozen"):
        made.num_layers = 3  # type: ignore[misc]
    with pytest.raises(AttributeError, match="did you mean 'num_layers'"):
        _ = made.num_layer
    assert made.replace(num_layers=5).num_layers == 5 and made.num_layers == 4
    with pytest.raises(ValueError, match="num_layer"):
        made.replace(num_layer=5)
    assert pickle.loads(pickle.dumps(made)) == made == copy.deepcopy(made)
    assert isinstance(made.cp_comm_type, tuple)
    assert "data_cache_path" in made.explicit and "split" not in made.explicit
    assert json.loads(made.to_json())["exit_signal"] == "SIGTERM"


def test_validate_leaves_its_argument_alone() -> None:
    arguments = parse_args(RUN.split())
    before = copy.deepcopy(arguments)
    validate(arguments, 1)
    assert arguments == before


def test_resolving_again_is_the_same() -> None:
    arguments = parse_args(f"{RUN} --swiglu --vocab-size 100".split())
    assert validate(arguments, 1) == validate(arguments, 1)


# derived values


def test_derived_sizes() -> None:
    made = config("--global-batch-size 24 --tensor-model-parallel-size 2", world_size=4)
    assert (made.data_parallel_size, made.num_microbatches, made.world_size) == (2, 6, 4)
    assert (made.ffn_hidden_size, made.kv_channels, made.num_query_groups) == (256, 8, 8)
    assert config("--swiglu").ffn_hidden_size == 128  # 8/3 x 64 = 170, down to a multiple of 64
    assert config().global_batch_size == 2
    assert config(world_size=3).global_batch_size == 6
    assert config("--group-query-attention --num-query-groups 2").num_query_groups == 2
    assert config().max_position_embeddings == 32


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", "no_shard"),
        ("--use-distributed-optimizer", "optim"),
        ("--use-megatron-fsdp", "optim_grads_params"),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy no_shard", "no_shard"),
        (
            "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads --use-distributed-optimizer",
            "optim_grads",
        ),
        ("--use-torch-fsdp2", "optim_grads_params"),
    ],
)
def test_sharding_strategy(words: str, expected: str) -> None:
    assert config(words, world_size=2).sharding_strategy == expected


def test_a_strategy_that_does_not_count_is_said() -> None:
    assert any(
        "counts with --use-megatron-fsdp only" in line
        for line in config("--data-parallel-sharding-strategy optim_grads").warnings
    )


@pytest.mark.parametrize(
    ("words", "dtypes"),
    [
        ("", ("fp32", "fp32", "fp32", "fp32")),
        ("--bf16", ("bf16", "fp32", "fp32", "fp32")),
        ("--fp16", ("fp16", "fp32", "fp32", "fp32")),
        ("--fp64", ("fp64", "fp64", "fp64", "fp64")),
        ("--bf16 --grad-reduce-in-bf16", ("bf16", "fp32", "fp32", "bf16")),
        ("--bf16 --megatron-fsdp-grad-comm-dtype bf16", ("bf16", "fp32", "fp32", "bf16")),
        ("--bf16 --main-grads-dtype bf16", ("bf16", "fp32", "bf16", "bf16")),
        ("--bf16 --megatron-fsdp-main-params-dtype auto", ("bf16", "bf16", "fp32", "fp32")),
        ("--bf16 --megatron-fsdp-main-grads-dtype bf16", ("bf16", "fp32", "bf16", "bf16")),
        ("--main-grads-dtype fp64", ("fp32", "fp32", "fp64", "fp64")),
    ],
)
def test_dtypes(words: str, dtypes: tuple[str, ...]) -> None:
    made = config(words)
    assert (made.params_dtype, made.main_params_dtype, made.main_grads_dtype, made.grad_comm_dtype) == dtypes


def test_dynamic_loss_scale_expects_overflows() -> None:
    assert config().check_for_nan_in_loss_and_grad
    assert not config("--fp16").check_for_nan_in_loss_and_grad
    assert config("--fp16 --loss-scale 1024").check_for_nan_in_loss_and_grad


def test_backend_and_implementation_follow_the_machine() -> None:
    made = config()
    assert (made.distributed_backend, made.transformer_impl, made.warnings) == ("gloo", "local", ())
    made = config("--distributed-backend nccl --transformer-impl transformer_engine")
    assert (made.distributed_backend, made.transformer_impl) == ("gloo", "local")
    assert len(made.warnings) == 2
    made = config("--transformer-impl local", device="cuda")
    assert made.distributed_backend == "nccl"
    assert (
        config("--distributed-backend gloo --transformer-impl local", device="cuda").transformer_impl
        == "local"
    )


@pytest.mark.parametrize("installed", [True, False])
def test_transformer_engine_where_it_is_installed(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if installed else None)
    assert config(device="cuda").transformer_impl == ("transformer_engine" if installed else "local")
    if not installed:
        with pytest.raises(ValueError, match="Transformer Engine is not installed"):
            config("--transformer-impl transformer_engine", device="cuda")


def test_sequence_parallel_alone_is_off_with_a_warning() -> None:
    made = config("--sequence-parallel")
    assert made.sequence_parallel is False
    assert any("--sequence-parallel" in line for line in made.warnings)
    assert (
        config("--sequence-parallel --tensor-model-parallel-size 2", world_size=2).sequence_parallel is True
    )


def test_no_ops_are_said_once_each() -> None:
    made = config("--use-mcore-models --no-bias-gelu-fusion --overlap-grad-reduce")
    assert len(made.notes) == 3
    assert all("has no effect" in line for line in made.notes)
    assert config().notes == ()


def test_older_spellings() -> None:
    made = config("--recompute-activations --use-rotary-position-embeddings")
    assert (made.recompute_granularity, made.recompute_modules) == ("selective", ("core_attn",))
    assert made.position_embedding_type == "rope"
    assert config(base=RUN.replace("--num-layers", "--encoder-num-layers")).num_layers == 4
    assert "contradict" in refused("--encoder-num-layers 5")
    assert "--moe-enable-deepep is for --moe-token-dispatcher-type flex" in refused("--moe-enable-deepep")
    flex = (
        "--moe-enable-deepep --moe-token-dispatcher-type flex --num-experts 4 --expert-model-parallel-size 2 "
        "--validate-only --moe-flex-dispatcher-backend hybridep"
    )
    assert config(flex, world_size=2).moe_flex_dispatcher_backend == "deepep"


# vocabulary


def test_vocabulary_padding() -> None:
    words = "--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 16"
    model = model_config_from(config(words, world_size=2), vocab_size=100)
    assert (model.vocab_size, model.padded_vocab_size) == (100, 128)
    assert config(f"{words} --vocab-size 100", world_size=2).padded_vocab_size == 128
    assert model_config_from(config("--no-pad-vocab-size"), vocab_size=101).padded_vocab_size == 101
    assert model_config_from(config("--padded-vocab-size 110"), vocab_size=101).padded_vocab_size == 110
    with pytest.raises(ValueError, match="--padded-vocab-size 90"):
        model_config_from(config("--padded-vocab-size 90"), vocab_size=101)
    with pytest.raises(ValueError, match="--vocab-size is missing"):
        model_config_from(config())


# batches


def test_rampup_follows_the_samples() -> None:
    made = config(
        "--rampup-batch-size 4 4 60 --global-batch-size 16 --train-samples 200",
        base=f"{MODEL} --lr 1 --mock-data --tokenizer-type ByteLevelTokenizer",
    )
    schedule = batch_schedule(made)
    assert [schedule.at(samples) for samples in (0, 19, 20, 39, 40, 59, 60, 10**9)] == [
        4,
        4,
        8,
        8,
        12,
        12,
        16,
        16,
    ]
    # By hand: 5 x 4 = 20, 3 x 8 = 44, 2 x 12 = 68, then (200 - 68) // 16 = 8.
    assert made.train_iters == 5 + 3 + 2 + 8
    assert schedule.samples_for(10) == 68 and schedule.samples_for(18) == 196
    assert made.num_microbatches == 8


def test_rampup_rounds_down_where_asked() -> None:
    words = "--rampup-batch-size 3 3 60 --global-batch-size 12 --train-samples 200"
    base = f"{MODEL} --lr 1 --mock-data --tokenizer-type ByteLevelTokenizer"
    assert "--rampup-batch-size" in refused(words, base=base)
    schedule = batch_schedule(later(f"{words} --decrease-batch-size-if-needed", base=base))
    assert [schedule.at(samples) for samples in (0, 20, 40, 60)] == [2, 6, 8, 12]
    assert "START" in refused(words.replace("--global-batch-size 12", "--global-batch-size 13"), base=base)


def test_step_schedule_counts_tokens() -> None:
    made = config("--step-batch-size-schedule 0:4 --seq-length 32")
    assert made.global_batch_size == 4
    assert parse_steps("0:4 1K:8 0.5M:16", 100) == ((0, 4), (10, 8), (5000, 16))
    for text in ("5:4", "0:4 x:8", "0:4 0:8", "0:4 1K", "0:0"):
        with pytest.raises(ValueError, match="--step-batch-size-schedule"):
            parse_steps(text, 100)
    assert "sets the global batch" in refused("--step-batch-size-schedule 0:4 --global-batch-size 4")


def test_samples_and_iterations_agree() -> None:
    schedule = BatchSchedule(((0, 2), (5, 6), (20, 10)), 2)
    for iterations in range(12):
        assert schedule.iterations_for(schedule.samples_for(iterations)) == iterations
    assert schedule.iterations_for(1) == 0


def test_validation_reads_no_environment_and_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "64")
    assert config(world_size=2).world_size == 2
    assert not dist.is_initialized()


def test_other_spellings() -> None:
    made = config("", base=RUN.replace("--seq-length 32", "--encoder-seq-length 32"))
    assert made.seq_length == made.encoder_seq_length == 32
    assert config("--exit-signal-handler-for-training").exit_signal_handler
    assert config("--use-torch-fsdp2").reshard_after_forward
    assert not config("--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward").reshard_after_forward
