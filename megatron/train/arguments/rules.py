"""Pairs of flags that cannot stand together, or need each other: one table, checked on what the user gave."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

from megatron.train.arguments.refuse import spelled
from megatron.train.arguments.tables import flags


@dataclass(frozen=True)
class Rule:
    """flags: those that the message names with their values. broken: whether a namespace breaks the rule.
    fix: what to do. example: words that break it, for the test of this table.
    """

    flags: tuple[str, ...]
    broken: Callable[[Namespace], bool]
    fix: str
    example: str


def _both(first: str, second: str, fix: str, example: str = "") -> Rule:
    """Two switches, or flags without a default, that exclude each other."""
    one, two = _dest(first), _dest(second)
    return Rule(
        (first, second),
        lambda v: bool(getattr(v, one)) and bool(getattr(v, two)),
        fix,
        example or f"{first} {second}",
    )


def _needs(first: str, second: str, fix: str, example: str = "") -> Rule:
    """A switch, or flag without a default, that does nothing without another."""
    one, two = _dest(first), _dest(second)
    return Rule(
        (first,),
        lambda v: bool(getattr(v, one)) and not getattr(v, two),
        f"it needs {second}; {fix}",
        example or first,
    )


def _dest(name: str) -> str:
    return next(flag.dest for flag in flags() if flag.name == name)


ONE = "give one of them"

RULES: tuple[Rule, ...] = (
    # precision
    _both("--bf16", "--fp16", ONE),
    _both("--fp64", "--bf16", ONE),
    _both("--fp64", "--fp16", ONE),
    _both("--fp8-format", "--fp4-format", ONE, "--fp8-format hybrid --fp4-format e2m1"),
    _needs("--fp8-param-gather", "--fp8-format", "add it or drop this one"),
    _needs("--first-last-layers-bf16", "--fp8-format", "add it or drop this one"),
    Rule(
        ("--fp8-format", "--transformer-impl"),
        lambda v: v.fp8 is not None and v.transformer_impl == "local",
        "FP8 is Transformer Engine's: use --transformer-impl transformer_engine",
        "--fp8-format hybrid --transformer-impl local",
    ),
    _needs("--fp16-lm-cross-entropy", "--fp16", "add it or drop this one"),
    Rule(
        ("--fp32-residual-connection",),
        lambda v: v.fp32_residual_connection and not (v.bf16 or v.fp16),
        "the residual stream is fp32 already: add --bf16 or --fp16, or drop the flag",
        "--fp32-residual-connection",
    ),
    Rule(
        ("--accumulate-allreduce-grads-in-fp32", "--main-grads-dtype"),
        lambda v: v.accumulate_allreduce_grads_in_fp32 and v.main_grads_dtype != "fp32",
        ONE,
        "--accumulate-allreduce-grads-in-fp32 --main-grads-dtype bf16",
    ),
    Rule(
        ("--grad-reduce-in-bf16", "--megatron-fsdp-grad-comm-dtype"),
        lambda v: v.grad_reduce_in_bf16 and v.megatron_fsdp_grad_comm_dtype not in ("auto", "bf16"),
        ONE,
        "--grad-reduce-in-bf16 --megatron-fsdp-grad-comm-dtype fp32",
    ),
    Rule(
        ("--exp-avg-dtype", "--exp-avg-sq-dtype", "--main-params-dtype"),
        lambda v: (
            (v.exp_avg_dtype, v.exp_avg_sq_dtype, v.main_params_dtype) != ("fp32",) * 3
            and not v.use_precision_aware_optimizer
        ),
        "states other than fp32 need --use-precision-aware-optimizer; add it",
        "--exp-avg-dtype bf16",
    ),
    _needs("--optimizer-cpu-offload", "--use-precision-aware-optimizer", "add it"),
    # sharding
    _both("--use-torch-fsdp2", "--use-megatron-fsdp", ONE),
    _both(
        "--use-torch-fsdp2",
        "--use-distributed-optimizer",
        "the first already shards optimizer states: drop the second",
    ),
    Rule(
        ("--outer-dp-sharding-strategy", "--num-distributed-optimizer-instances"),
        lambda v: v.outer_dp_sharding_strategy != "no_shard" and v.num_distributed_optimizer_instances == 1,
        "there is no outer axis with one instance: raise the second or drop the first",
        "--outer-dp-sharding-strategy optim",
    ),
    # model
    _both("--swiglu", "--squared-relu", ONE),
    _both("--swiglu", "--quick-geglu", ONE),
    _both("--squared-relu", "--quick-geglu", ONE),
    _both("--qk-layernorm", "--qk-l2-norm", ONE),
    Rule(
        ("--use-rotary-position-embeddings", "--position-embedding-type"),
        lambda v: (
            v.use_rotary_position_embeddings
            and "position_embedding_type" in v.explicit
            and v.position_embedding_type != "rope"
        ),
        "the first means rope: drop one of them",
        "--use-rotary-position-embeddings --position-embedding-type none",
    ),
    Rule(
        ("--no-position-embedding", "--position-embedding-type"),
        lambda v: (
            not v.add_position_embedding
            and "position_embedding_type" in v.explicit
            and v.position_embedding_type == "learned_absolute"
        ),
        "use --position-embedding-type rope or none",
        "--no-position-embedding --position-embedding-type learned_absolute",
    ),
    Rule(
        ("--mtp-num-layers", "--position-embedding-type"),
        lambda v: (
            bool(v.mtp_num_layers)
            and v.position_embedding_type not in ("rope", "none", "yarn")
            and not v.use_rotary_position_embeddings
            and not v.multi_latent_attention
        ),
        "multi-token prediction needs --position-embedding-type rope or none",
        "--mtp-num-layers 1",
    ),
    # pipeline
    _both(
        "--num-layers-per-virtual-pipeline-stage",
        "--num-virtual-stages-per-pipeline-rank",
        ONE,
        "--num-layers-per-virtual-pipeline-stage 1 --num-virtual-stages-per-pipeline-rank 2",
    ),
    _both(
        "--num-layers-per-virtual-pipeline-stage",
        "--pipeline-model-parallel-layout",
        ONE,
        "--num-layers-per-virtual-pipeline-stage 1 --pipeline-model-parallel-layout Et|tL",
    ),
    _both(
        "--num-virtual-stages-per-pipeline-rank",
        "--pipeline-model-parallel-layout",
        ONE,
        "--num-virtual-stages-per-pipeline-rank 2 --pipeline-model-parallel-layout Et|tL",
    ),
    _both(
        "--decoder-first-pipeline-num-layers",
        "--pipeline-model-parallel-layout",
        "the layout says it already: " + ONE,
        "--decoder-first-pipeline-num-layers 1 --pipeline-model-parallel-layout Et|tL",
    ),
    _both(
        "--decoder-last-pipeline-num-layers",
        "--pipeline-model-parallel-layout",
        "the layout says it already: " + ONE,
        "--decoder-last-pipeline-num-layers 1 --pipeline-model-parallel-layout Et|tL",
    ),
    _both(
        "--decoder-first-pipeline-num-layers",
        "--num-layers-per-virtual-pipeline-stage",
        "use --num-virtual-stages-per-pipeline-rank with uneven stages",
        "--decoder-first-pipeline-num-layers 1 --num-layers-per-virtual-pipeline-stage 1",
    ),
    Rule(
        ("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"),
        lambda v: (
            v.pipeline_model_parallel_size == 1
            and bool(
                v.num_layers_per_virtual_pipeline_stage or (v.num_virtual_stages_per_pipeline_rank or 1) > 1
            )
        ),
        "interleaving needs --pipeline-model-parallel-size 2 or more",
        "--num-layers-per-virtual-pipeline-stage 1",
    ),
    # sequence and context
    Rule(
        ("--tp-comm-overlap",),
        lambda v: v.tp_comm_overlap and not v.sequence_parallel,
        "it needs --sequence-parallel; add it or drop this one",
        "--tp-comm-overlap",
    ),
    Rule(
        ("--cp-comm-type",),
        lambda v: "a2a+p2p" in v.cp_comm_type and not v.hierarchical_context_parallel_sizes,
        "it needs --hierarchical-context-parallel-sizes; add them",
        "--cp-comm-type a2a+p2p",
    ),
    Rule(
        ("--hierarchical-context-parallel-sizes",),
        lambda v: bool(v.hierarchical_context_parallel_sizes) and "a2a+p2p" not in v.cp_comm_type,
        "it needs --cp-comm-type a2a+p2p; add it or drop this one",
        "--hierarchical-context-parallel-sizes 2 2",
    ),
    # experts
    Rule(
        ("--expert-tensor-parallel-size",),
        lambda v: (v.expert_tensor_parallel_size or 1) > 1 and not v.num_experts,
        "it needs --num-experts; add it or drop this one",
        "--expert-tensor-parallel-size 2",
    ),
    Rule(
        ("--expert-model-parallel-size",),
        lambda v: v.expert_model_parallel_size > 1 and not v.num_experts,
        "it needs --num-experts; add it or drop this one",
        "--expert-model-parallel-size 2",
    ),
    Rule(
        ("--moe-router-num-groups", "--moe-router-group-topk"),
        lambda v: (v.moe_router_num_groups is None) != (v.moe_router_group_topk is None),
        "group-limited routing needs both",
        "--num-experts 8 --moe-router-num-groups 4",
    ),
    Rule(
        ("--moe-router-enable-expert-bias", "--moe-router-score-function"),
        lambda v: v.moe_router_enable_expert_bias and v.moe_router_score_function == "softmax",
        "the bias is for sigmoid scores: add --moe-router-score-function sigmoid",
        "--num-experts 8 --moe-router-enable-expert-bias",
    ),
    Rule(
        ("--moe-pad-expert-input-to-capacity",),
        lambda v: v.moe_pad_expert_input_to_capacity and v.moe_expert_capacity_factor is None,
        "it needs --moe-expert-capacity-factor; add it",
        "--num-experts 8 --moe-pad-expert-input-to-capacity",
    ),
    Rule(
        ("--overlap-moe-expert-parallel-comm",),
        lambda v: v.overlap_moe_expert_parallel_comm and v.expert_model_parallel_size == 1,
        "there is nothing to overlap with --expert-model-parallel-size 1; drop it",
        "--overlap-moe-expert-parallel-comm",
    ),
    # length and learning rate
    _both("--train-iters", "--train-samples", ONE, "--train-iters 1 --train-samples 8"),
    *(
        _both("--train-iters", flag, "count in iterations: use " + other, f"--train-iters 9 {flag} {value}")
        for flag, other, value in (
            ("--lr-decay-samples", "--lr-decay-iters", "8"),
            ("--lr-warmup-samples", "--lr-warmup-iters", "8"),
            ("--lr-wsd-decay-samples", "--lr-wsd-decay-iters", "8"),
            ("--rampup-batch-size", "--train-samples, which a ramp-up needs", "4 4 64"),
        )
    ),
    *(
        _both("--train-samples", flag, "count in samples: use " + other, f"--train-samples 99 {flag} 2")
        for flag, other in (
            ("--lr-decay-iters", "--lr-decay-samples"),
            ("--lr-warmup-iters", "--lr-warmup-samples"),
            ("--lr-wsd-decay-iters", "--lr-wsd-decay-samples"),
        )
    ),
    _both("--lr-warmup-fraction", "--lr-warmup-iters", ONE, "--lr-warmup-fraction 0.1 --lr-warmup-iters 2"),
    _both(
        "--lr-warmup-fraction",
        "--lr-warmup-samples",
        ONE,
        "--lr-warmup-fraction 0.1 --lr-warmup-samples 2 --train-samples 99",
    ),
    Rule(
        ("--lr-decay-style",),
        lambda v: v.lr_decay_style == "WSD" and not (v.lr_wsd_decay_iters or v.lr_wsd_decay_samples),
        "WSD needs the length of its last phase: add --lr-wsd-decay-iters or --lr-wsd-decay-samples",
        "--lr-decay-style WSD",
    ),
    _needs("--decoupled-min-lr", "--decoupled-lr", "add it", "--decoupled-min-lr 0.1"),
    _both("--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler", ONE),
    Rule(
        ("--weight-decay-incr-style", "--start-weight-decay", "--end-weight-decay"),
        lambda v: (
            v.weight_decay_incr_style != "constant"
            and (v.start_weight_decay is None or v.end_weight_decay is None)
        ),
        "a weight decay that changes needs both its start and its end",
        "--weight-decay-incr-style linear",
    ),
    Rule(
        ("--weight-decay-incr-style", "--start-weight-decay", "--end-weight-decay"),
        lambda v: (
            v.weight_decay_incr_style == "constant"
            and (v.start_weight_decay is not None or v.end_weight_decay is not None)
        ),
        "a constant weight decay is --weight-decay: drop start and end, or choose linear or cosine",
        "--start-weight-decay 0.1",
    ),
    # recompute
    Rule(
        ("--recompute-granularity", "--recompute-method", "--recompute-num-layers"),
        lambda v: (
            v.recompute_granularity == "full"
            and (v.recompute_method is None or v.recompute_num_layers is None)
        ),
        "full recompute needs --recompute-method uniform or block, and --recompute-num-layers",
        "--recompute-granularity full",
    ),
    Rule(
        ("--recompute-granularity", "--recompute-method", "--recompute-num-layers"),
        lambda v: (
            v.recompute_granularity != "full"
            and (v.recompute_method is not None or v.recompute_num_layers is not None)
        ),
        "method and number of layers belong to --recompute-granularity full",
        "--recompute-granularity selective --recompute-method block",
    ),
    Rule(
        ("--recompute-modules",),
        lambda v: (
            bool(v.recompute_modules)
            and v.recompute_granularity != "selective"
            and not v.recompute_activations
        ),
        "modules belong to --recompute-granularity selective",
        "--recompute-modules mlp",
    ),
    Rule(
        ("--recompute-activations", "--recompute-granularity"),
        lambda v: v.recompute_activations and v.recompute_granularity == "full",
        "the first means selective: drop one of them",
        "--recompute-activations --recompute-granularity full --recompute-method block "
        "--recompute-num-layers 1",
    ),
    Rule(
        ("--distribute-saved-activations",),
        lambda v: (
            v.distribute_saved_activations
            and (v.tensor_model_parallel_size == 1 or v.recompute_granularity != "full")
        ),
        "it needs --tensor-model-parallel-size 2 or more and --recompute-granularity full",
        "--distribute-saved-activations",
    ),
    # data
    _both("--data-path", "--data-args-path", ONE, "--data-path a --data-args-path b"),
    *(
        _both("--mock-data", flag, "mock data needs no files: " + ONE, f"--mock-data {flag} a")
        for flag in ("--data-path", "--data-args-path", "--train-data-path", "--per-split-data-args-path")
    ),
    *(
        _both(flag, other, "one blend for all splits, or one for each: " + ONE, f"{flag} a {other} b")
        for flag in ("--data-path", "--data-args-path")
        for other in (
            "--train-data-path",
            "--valid-data-path",
            "--test-data-path",
            "--per-split-data-args-path",
        )
    ),
    *(
        _both("--per-split-data-args-path", flag, ONE, f"--per-split-data-args-path a {flag} b")
        for flag in ("--train-data-path", "--valid-data-path", "--test-data-path")
    ),
    Rule(
        ("--split", "--train-data-path"),
        lambda v: v.split is not None and bool(v.train_data_path or v.per_split_data_args_path),
        "the data is split already: drop --split",
        "--split 9,1,0 --train-data-path a",
    ),
    # checkpoints
    _needs("--ckpt-step", "--load", "say where to load from", "--ckpt-step 5"),
    _needs("--exit-on-missing-checkpoint", "--load", "say where to load from"),
    _needs("--use-checkpoint-args", "--load", "say where to load from"),
    _needs("--use-checkpoint-opt_param-scheduler", "--load", "say where to load from"),
    _needs("--save-retain-interval", "--save-interval", "give it too", "--save-retain-interval 4"),
    _needs("--load-main-params-from-ckpt", "--no-load-optim", "add it"),
    _needs("--async-save", "--save", "say where to save"),
    # processes
    _needs("--replication", "--replication-jump", "add it"),
)


def check_rules(v: Namespace) -> None:
    """Raises ValueError for the first broken rule. v: arguments as given, before anything is resolved."""
    for rule in RULES:
        if rule.broken(v):
            named = {name: next(flag for flag in flags() if flag.name == name) for name in rule.flags}
            given = [
                spelled(flag, getattr(v, flag.dest))
                for flag in named.values()
                if getattr(v, flag.dest) != flag.default or flag.dest in v.explicit or len(named) == 1
            ]
            shown = given or list(named)
            raise ValueError(f"{' with '.join(shown)}: {rule.fix}")
