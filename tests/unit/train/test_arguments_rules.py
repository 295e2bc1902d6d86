"""What cannot be: one line that names the flags, their values and the fix, before anything is built."""

from __future__ import annotations

import shlex
from types import SimpleNamespace

import pytest

from megatron.train.arguments import parse_args, validate
from megatron.train.arguments.rules import RULES, Rule
from megatron.train.arguments.validate import check_and_resolve
from tests.unit.train.test_arguments import MODEL, RUN, config, later, refused


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.example)
def test_illegal_pairs(rule: Rule) -> None:
    """O06: named before anything is built, with the flags and the fix."""
    base = MODEL + " --lr 1" if "--train-" in rule.example else MODEL + " --lr 1 --train-iters 10"
    arguments = parse_args([*base.split(), *shlex.split(rule.example)])
    with pytest.raises(ValueError) as caught:
        check_and_resolve(arguments, 8)
    message = str(caught.value)
    assert rule.fix in message and "\n" not in message
    given = [name for name in rule.flags if name in rule.example]
    assert all(name in message for name in given or rule.flags)


@pytest.mark.parametrize(
    ("words", "world_size", "expected"),
    [
        ("--tensor-model-parallel-size 3", 4, "4 ranks cannot hold --tensor-model-parallel-size 3"),
        ("--global-batch-size 7", 1, "--global-batch-size 7 is not a multiple of --micro-batch-size 2"),
        ("--global-batch-size 4", 4, "take a multiple of 8"),
        ("--eval-global-batch-size 3", 1, "--eval-global-batch-size 3"),
        ("--hidden-size 65", 1, "--hidden-size 65 is not a multiple of --num-attention-heads 8"),
        ("--tensor-model-parallel-size 16", 16, "--num-attention-heads 8 is not a multiple of"),
        ("--group-query-attention --num-query-groups 3", 1, "--num-query-groups 3"),
        ("--group-query-attention --num-query-groups 16", 1, "--num-query-groups 16"),
        ("--num-query-groups 2", 1, "needs --group-query-attention"),
        ("--ffn-hidden-size 63 --tensor-model-parallel-size 2", 2, "--ffn-hidden-size 63"),
        ("--context-parallel-size 2 --seq-length 34", 2, "--seq-length 34 is not a multiple of 2 x"),
        ("--sequence-parallel --tensor-model-parallel-size 4 --seq-length 30", 4, "--sequence-parallel"),
        ("--cp-comm-type ring", 1, "--cp-comm-type ring: choose p2p, a2a, all_gather or a2a+p2p"),
        (
            "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 3 --context-parallel-size 4",
            4,
            "--hierarchical-context-parallel-sizes [2, 3]: give two sizes above 1 whose product is "
            "--context-parallel-size 4",
        ),
        (
            "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 1 4 --context-parallel-size 4",
            4,
            "--hierarchical-context-parallel-sizes [1, 4]",
        ),
        ("--cp-comm-type p2p a2a", 1, "--cp-comm-type has 2 values"),
        ("--cp-comm-type a2a --context-parallel-size 16 --seq-length 64", 16, "--num-attention-heads 8"),
        ("--context-parallel-size 2 --attention-dropout 0.1", 2, "use --attention-dropout 0"),
        ("--max-position-embeddings 16", 1, "--max-position-embeddings 16 is less than --seq-length 32"),
        ("--pipeline-model-parallel-size 7", 7, "stage 1 of 7 has nothing to do (--num-layers 4"),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3", 2, "--num-layers 4"),
        (
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
            "--microbatch-group-size-per-virtual-pipeline-stage 1",
            2,
            "--microbatch-group-size-per-virtual-pipeline-stage 1 is less than --pipeline-model-parallel-size 2",
        ),
        ("--num-experts 6 --expert-model-parallel-size 4", 4, "--num-experts 6 is not a multiple"),
        (
            "--num-experts 4 --moe-router-topk 5",
            1,
            "--moe-router-topk 5: choose between 1 and --num-experts 4",
        ),
        (
            "--num-experts 4 --expert-model-parallel-size 4",
            2,
            "2 ranks cannot hold --expert-model-parallel-size 4",
        ),
        (
            "--num-experts 8 --moe-router-num-groups 3 --moe-router-group-topk 1",
            1,
            "--moe-router-num-groups 3",
        ),
        (
            "--num-experts 8 --moe-router-num-groups 4 --moe-router-group-topk 5",
            1,
            "--moe-router-group-topk 5",
        ),
        (
            "--num-experts 8 --moe-router-topk 5 --moe-router-num-groups 4 --moe-router-group-topk 2",
            1,
            "--moe-router-topk 5 is more than",
        ),
        ("--num-experts 8 --moe-layer-freq ([0]*1+[1]*4)", 1, "--moe-layer-freq describes 5 layers"),
        ("--num-distributed-optimizer-instances 3 --use-distributed-optimizer", 4, "choose a divisor"),
        ("--num-distributed-optimizer-instances 2", 4, "with nothing sharded"),
        (
            "--num-distributed-optimizer-instances 2 --outer-dp-sharding-strategy optim --use-distributed-optimizer",
            4,
            "needs --data-parallel-sharding-strategy optim_grads_params",
        ),
        ("--min-lr 1", 1, "--min-lr 1.0 is above --lr 0.001"),
        ("--lr-warmup-iters 10", 1, "--lr-warmup-iters 10 leaves nothing of the 10"),
        ("--lr-warmup-init 1", 1, "--lr-warmup-init 1.0 is above --lr"),
        ("--attention-dropout 1.0", 1, "--attention-dropout 1.0: give a number below 1"),
        ("--clip-grad -1", 1, "--clip-grad -1.0: give 0 or more"),
        ("--lr nan", 1, "--lr nan"),
        ("--micro-batch-size 0", 1, "--micro-batch-size 0"),
        ("--tensor-model-parallel-size 0", 1, "--tensor-model-parallel-size 0: give 1 or more"),
        ("--num-layers -4", 1, "--num-layers -4"),
        ("--save-interval 4 --save-retain-interval 6", 1, "--save-retain-interval 6 is not a multiple of"),
        ("--vocab-size 200 --padded-vocab-size 100", 1, "--padded-vocab-size 100"),
        ("--profile --profile-step-start 5 --profile-step-end 5", 1, "--profile-step-end 5"),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 9",
            1,
            "--recompute-num-layers 9",
        ),
        ("--no-position-embedding", 1, "--position-embedding-type rope or none"),
    ],
)
def test_limits(words: str, world_size: int, expected: str) -> None:
    assert expected in refused(words, world_size)


@pytest.mark.parametrize("name", ["--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length"])
def test_missing_values(name: str) -> None:
    words = RUN.split()
    at = words.index(name)
    assert f"{name} is missing" in refused("", base=" ".join(words[:at] + words[at + 2 :]))


def test_missing_for_training() -> None:
    assert "--train-iters is missing" in refused("", base=f"{MODEL} --lr 1 --mock-data")
    assert "--lr is missing" in refused("", base=f"{MODEL} --train-iters 1 --mock-data")
    assert "--data-path is missing" in refused("", base=f"{MODEL} --train-iters 1 --lr 1")
    assert "--tokenizer-type is missing" in refused("", base=f"{MODEL} --train-iters 1 --lr 1 --mock-data")
    assert later("--skip-train", base=f"{MODEL} --mock-data --tokenizer-type ByteLevelTokenizer").skip_train
    assert "WORLD_SIZE" in refused("", world_size=0)


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        ("SentencePieceTokenizer", "--tokenizer-model"),
        ("HuggingFaceTokenizer", "--tokenizer-model"),
        ("GPT2BPETokenizer --merge-file m", "--vocab-file"),
        ("GPT2BPETokenizer --vocab-file v", "--merge-file"),
        ("NullTokenizer", "--vocab-size"),
    ],
)
def test_tokenizers_need_their_files(words: str, missing: str) -> None:
    assert f"needs {missing}" in refused(f"--tokenizer-type {words}")


def test_the_models_own_rules_come_first() -> None:
    assert "--recompute-modules" in refused(
        "--recompute-granularity selective --recompute-modules everything", resolve=config
    )
    assert "--rotary-percent" in refused(
        "--position-embedding-type rope --rotary-percent 0.4", resolve=config
    )


def test_what_is_not_built_is_refused_by_name() -> None:
    message = refused("--perform-rl-step --fp4-format e2m1", resolve=config)
    assert "--perform-rl-step is not supported: reinforcement learning" in message
    assert "--fp4-format e2m1 is not supported" in message and "use --bf16" in message
    assert config("--cuda-graph-impl none --fp4-recipe nvfp4").cuda_graph_impl == "none"
    message = refused("--optimizer soap", resolve=config)
    assert "--optimizer soap is not built" in message and "use adam" in message
    with pytest.raises(ValueError, match="--perform-rl-step is not supported"):
        validate(
            parse_args(RUN.split(), {"perform_rl_step": True}), 1, "cpu"
        )  # also where a preset asks for it
    assert "--tokenizer-type MultimodalTokenizer" in refused(
        "--tokenizer-type MultimodalTokenizer", resolve=config
    )


def test_legal_interleaving_resolves() -> None:
    made = later(
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 8", 2
    )
    assert made.virtual_pipeline_model_parallel_size == 2
    made = later("--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 2 --num-layers 5", 4)
    assert made.virtual_pipeline_model_parallel_size is None


def test_what_attention_of_a_sequence_over_ranks_can_do_depends_on_whose_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch's repeats groups and keeps to documents; Transformer Engine's does neither."""
    installed = SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: name))
    monkeypatch.setattr("megatron.train.arguments.resolve.importlib", installed)
    words = "--context-parallel-size 2 --attention-dropout 0"
    groups = f"{words} --cp-comm-type a2a --group-query-attention --num-query-groups 1"
    packed = f"{words} --reset-attention-mask"
    for both in (groups, packed):
        assert config(f"{both} --transformer-impl local", 2).context_parallel_size == 2
    for wrong, message in (
        (groups, "--num-query-groups 1 is not a multiple"),
        (packed, "--reset-attention-mask with"),
    ):
        with pytest.raises(ValueError, match=message):
            config(f"{wrong} --transformer-impl transformer_engine", 2, device="cuda")
