"""What must divide, fit or lie in a range: checked on resolved values, before any process group exists."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence

from megatron.parallel.context import ContextParallelShape, check_context_parallel
from megatron.parallel.pipeline.schedules import make_schedule
from megatron.parallel.pipeline.stages import StageLayers
from megatron.train.arguments.experts import check_experts
from megatron.train.arguments.fp8 import check_fp8_sizes
from megatron.train.arguments.overlap import check_overlap
from megatron.train.arguments.ranges import check_multiple, check_ranges
from megatron.train.pipeline import pipeline_plan


def check_limits(v: Namespace) -> None:
    """Raises ValueError naming flags, values and the fix. v: a resolved namespace."""
    for check in _CHECKS:
        check(v)


def _tensor(v: Namespace) -> None:
    tensor = v.tensor_model_parallel_size
    by = f"--tensor-model-parallel-size {tensor}"
    check_multiple("--num-attention-heads", v.num_attention_heads, by, tensor)
    check_multiple(
        "--num-attention-heads",
        v.num_attention_heads,
        f"--num-query-groups {v.num_query_groups}",
        v.num_query_groups,
    )
    if v.num_query_groups % tensor and tensor % v.num_query_groups:
        raise ValueError(
            f"--num-query-groups {v.num_query_groups} and {by}: one must be a multiple of the other"
        )
    check_multiple("--ffn-hidden-size", v.ffn_hidden_size, by, tensor)
    if v.padded_vocab_size is not None:
        check_multiple("--padded-vocab-size", v.padded_vocab_size, by, tensor)
        if v.vocab_size is not None and v.padded_vocab_size < v.vocab_size:
            raise ValueError(
                f"--padded-vocab-size {v.padded_vocab_size} is smaller than --vocab-size "
                f"{v.vocab_size}: raise it"
            )


def _sequence(v: Namespace) -> None:
    length, context, tensor = v.seq_length, v.context_parallel_size, v.tensor_model_parallel_size
    if context > 1:
        check_multiple("--seq-length", length, f"2 x --context-parallel-size {context}", 2 * context)
    if v.sequence_parallel or v.num_experts:
        reason = "--sequence-parallel" if v.sequence_parallel else f"--num-experts {v.num_experts}"
        check_multiple(
            "--seq-length",
            length,
            f"--context-parallel-size {context} x --tensor-model-parallel-size {tensor} ({reason})",
            context * tensor,
        )
    if v.max_position_embeddings < length:
        raise ValueError(
            f"--max-position-embeddings {v.max_position_embeddings} is less than --seq-length "
            f"{length}: raise it"
        )
    if len(v.cp_comm_type) not in (1, v.num_layers):
        raise ValueError(
            f"--cp-comm-type has {len(v.cp_comm_type)} values: give one, or one for each of "
            f"--num-layers {v.num_layers}"
        )
    for kind in v.cp_comm_type:
        if kind not in ("p2p", "a2a", "all_gather", "a2a+p2p"):
            raise ValueError(f"--cp-comm-type {kind}: choose p2p, a2a, all_gather or a2a+p2p")
    if context > 1:
        _context(v)


def _context(v: Namespace) -> None:
    """What the attention of a sequence over several ranks cannot do."""
    context, tensor, groups = v.context_parallel_size, v.tensor_model_parallel_size, v.num_query_groups
    exchanging = _exchanging_ranks(v)
    if exchanging > 1:
        # Ulysses exchanges sequence for heads: each context rank takes whole heads.
        by = f"{exchanging} ranks of --cp-comm-type a2a x --tensor-model-parallel-size {tensor}"
        check_multiple("--num-attention-heads", v.num_attention_heads, by, tensor * exchanging)
    if v.transformer_impl == "local" or v.attention_backend == "local":
        for flag, value, usual in (
            ("--window-size", v.window_size and ",".join(map(str, v.window_size)), None),
            ("--softmax-type", v.softmax_type, "vanilla"),
        ):
            if value != usual:
                raise ValueError(
                    f"{flag} {value} with --context-parallel-size {context}: torch's attention over several ranks "
                    f"does not have it; drop {flag}, or use --context-parallel-size 1"
                )
        heads, own_groups = v.num_attention_heads // tensor, max(1, groups // tensor)
        for kind in v.cp_comm_type:
            check_context_parallel(
                ContextParallelShape(
                    v.seq_length, context, kind, heads, own_groups, v.attention_dropout, exchanging
                )
            )
        return
    if exchanging > 1 and max(groups, tensor) % (tensor * exchanging):
        raise ValueError(
            f"--num-query-groups {groups} is not a multiple of {by}: use --cp-comm-type p2p, or "
            "--transformer-impl local, which repeats groups"
        )
    if v.reset_attention_mask:
        raise ValueError(
            f"--reset-attention-mask with --context-parallel-size {context}: Transformer Engine cannot keep "
            "attention inside documents; add --transformer-impl local, or drop one of them"
        )


def _exchanging_ranks(v: Namespace) -> int:
    """Context ranks that exchange sequence for heads."""
    context, sizes = v.context_parallel_size, v.hierarchical_context_parallel_sizes
    if "a2a+p2p" in v.cp_comm_type:
        if sizes is None or len(sizes) != 2 or min(sizes) < 2 or sizes[0] * sizes[1] != context:
            raise ValueError(
                f"--hierarchical-context-parallel-sizes {sizes}: give two sizes above 1 whose product is "
                f"--context-parallel-size {context}, or use --cp-comm-type p2p or a2a"
            )
        inner: int = sizes[0]
    else:
        inner = 1
    return context if "a2a" in v.cp_comm_type else inner


def _delayed(v: Namespace) -> None:
    delayed_experts = v.delay_wgrad_compute and v.num_experts and v.transformer_impl == "transformer_engine"
    if delayed_experts and not v.gradient_accumulation_fusion:
        raise ValueError(
            "--delay-wgrad-compute with --no-gradient-accumulation-fusion: Transformer Engine delays weight "
            "gradients of experts only where they are fused; drop one of them"
        )


def _pipeline(v: Namespace) -> None:
    ranks = v.pipeline_model_parallel_size
    if ranks == 1:
        for flag, given in (
            ("--pipeline-model-parallel-layout", v.pipeline_model_parallel_layout),
            ("--decoder-first-pipeline-num-layers", v.decoder_first_pipeline_num_layers),
            ("--decoder-last-pipeline-num-layers", v.decoder_last_pipeline_num_layers),
            ("--pipeline-schedule", v.pipeline_schedule),
        ):
            if given is not None:
                raise ValueError(f"{flag} is for pipelines: give --pipeline-model-parallel-size 2 or more")
        return
    plan = pipeline_plan(v)
    _predictions(v, plan.stages)
    _group_size(plan.schedule, plan.group_size, ranks)
    # Says the schedule's own rules; any number of microbatches will do.
    make_schedule(plan.schedule, plan.shape(ranks, 1), plan.group_size)


def _predictions(v: Namespace, stages: Sequence[StageLayers]) -> None:
    """Multi-token prediction (m) runs with the loss, or all of it on the stage just before one of the loss alone."""
    count = sum(stage.num_mtp for stage in stages)
    layout = f"--pipeline-model-parallel-layout {v.pipeline_model_parallel_layout}"
    if count and count != (v.mtp_num_layers or 0):
        raise ValueError(
            f"{layout} has {count} m, --mtp-num-layers is {v.mtp_num_layers or 0}: make them equal"
        )
    where = [index for index, stage in enumerate(stages) if stage.num_mtp]
    last = len(stages) - 1
    alone = where == [last - 1]
    if where not in ([], [last], [last - 1]) or (alone and stages[last].layers):
        raise ValueError(
            f"{layout}: put all prediction layers (m) on one stage, that of the loss (L), or the one before it, after "
            "the last t, with nothing but L behind"
        )
    ranks = v.pipeline_model_parallel_size
    if alone and ranks == 2 and len(stages) > 2:
        raise ValueError(
            f"{layout}: prediction layers (m) before the last of {len(stages)} stages share a rank with the first, and "
            "each needs its embedding: put them on the stage of the loss (L), or use --pipeline-model-parallel-size 4"
        )


def _group_size(schedule: str, size: int | None, ranks: int) -> None:
    if schedule == "interleaved" and size is not None and size < ranks:
        raise ValueError(
            f"--microbatch-group-size-per-virtual-pipeline-stage {size} is less than --pipeline-model-parallel-size "
            f"{ranks}: raise it, or leave it out"
        )


def _prediction(v: Namespace) -> None:
    if v.mtp_num_layers and v.mtp_num_layers >= v.seq_length:
        raise ValueError(
            f"--mtp-num-layers {v.mtp_num_layers} looks past the end of --seq-length {v.seq_length}: lower it"
        )


def _data_parallel(v: Namespace) -> None:
    outer = v.num_distributed_optimizer_instances
    if v.data_parallel_size % outer:
        raise ValueError(
            f"--num-distributed-optimizer-instances {outer} does not divide the data-parallel size "
            f"{v.data_parallel_size}: choose a divisor of it"
        )
    if outer > 1 and v.sharding_strategy == "no_shard":
        raise ValueError(
            f"--num-distributed-optimizer-instances {outer} with nothing sharded: add "
            "--use-distributed-optimizer "
            "or --use-megatron-fsdp, or drop it"
        )
    if v.outer_sharding_strategy == "optim" and v.sharding_strategy != "optim_grads_params":
        raise ValueError(
            "--outer-dp-sharding-strategy optim needs --data-parallel-sharding-strategy "
            "optim_grads_params, not "
            f"{v.sharding_strategy}: use that, or --outer-dp-sharding-strategy no_shard"
        )
    if (
        v.check_weight_hash_across_dp_replicas_interval is not None
        and v.sharding_strategy == "optim_grads_params"
    ):
        raise ValueError(
            "--check-weight-hash-across-dp-replicas-interval "
            f"{v.check_weight_hash_across_dp_replicas_interval}: "
            "optim_grads_params leaves no replicas to compare; drop it"
        )


def _schedule(v: Namespace) -> None:
    if v.skip_train:
        return
    if not v.train_iters:
        raise ValueError(
            "--train-iters is missing: give the number of steps, or --train-samples, or --skip-train"
        )
    if v.lr is None:
        raise ValueError("--lr is missing: give the highest learning rate")
    if v.min_lr > v.lr:
        raise ValueError(f"--min-lr {v.min_lr} is above --lr {v.lr}: lower it")
    if v.decoupled_lr is not None and (v.decoupled_min_lr or 0.0) > v.decoupled_lr:
        raise ValueError(
            f"--decoupled-min-lr {v.decoupled_min_lr} is above --decoupled-lr {v.decoupled_lr}: lower it"
        )
    for warmup, decay, default in (
        ("lr_warmup_iters", "lr_decay_iters", v.train_iters),
        ("lr_warmup_samples", "lr_decay_samples", v.train_samples),
    ):
        most = getattr(v, decay) or default
        if most and getattr(v, warmup) >= most and getattr(v, warmup) > 0:
            raise ValueError(
                f"--{warmup.replace('_', '-')} {getattr(v, warmup)} leaves nothing of the {most} of "
                "the schedule "
                f"(--{decay.replace('_', '-')}): lower it"
            )
    if v.save_retain_interval is not None:
        check_multiple(
            "--save-retain-interval",
            v.save_retain_interval,
            f"--save-interval {v.save_interval}",
            v.save_interval,
        )


def _recompute(v: Namespace) -> None:
    if v.recompute_num_layers is not None and v.recompute_num_layers > v.num_layers:
        raise ValueError(
            f"--recompute-num-layers {v.recompute_num_layers} is more than --num-layers "
            f"{v.num_layers}: lower it"
        )


def _sources(v: Namespace) -> None:
    files = (v.data_path, v.data_args_path, v.train_data_path, v.valid_data_path, v.test_data_path)
    if not v.mock_data and v.per_split_data_args_path is None and not any(files):
        raise ValueError("--data-path is missing: give the prefix of a .bin/.idx pair, or --mock-data")


_TOKENIZER_FILES = {
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "NullTokenizer": ("vocab_size",),
    "ByteLevelTokenizer": (),
}


def _tokenizer(v: Namespace) -> None:
    if v.tokenizer_type is None:
        raise ValueError(
            "--tokenizer-type is missing: give one, such as SentencePieceTokenizer with --tokenizer-model, or "
            "NullTokenizer with --vocab-size"
        )
    for dest in _TOKENIZER_FILES.get(v.tokenizer_type, ("tokenizer_model",)):
        if getattr(v, dest) is None:
            raise ValueError(f"--tokenizer-type {v.tokenizer_type} needs --{dest.replace('_', '-')}: give it")


def _profile(v: Namespace) -> None:
    if v.profile and v.profile_step_end <= v.profile_step_start:
        raise ValueError(
            f"--profile-step-end {v.profile_step_end} is not after --profile-step-start "
            f"{v.profile_step_start}"
        )


_CHECKS: tuple[Callable[[Namespace], None], ...] = (
    check_ranges,
    _tensor,
    _sequence,
    _delayed,
    _pipeline,
    check_experts,
    check_overlap,
    check_fp8_sizes,
    _prediction,
    _data_parallel,
    _schedule,
    _recompute,
    _sources,
    _tokenizer,
    _profile,
)
