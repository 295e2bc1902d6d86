"""Flags that are given and read by nothing in this run: what they need, and the line that says so."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

from megatron.train.arguments.flag import Flag
from megatron.train.arguments.refuse import is_given, spelled
from megatron.train.arguments.tables import GROUPS, flags, moe, moe_dispatch


@dataclass(frozen=True)
class Idle:
    """Flags that nothing reads where `idle` (of the resolved namespace) is true, `because` says when.

    flags: names, or the title of a group of the tables, all of whose flags are meant.
    """

    flags: tuple[str, ...] | str
    idle: Callable[[Namespace], bool]
    because: str

    def members(self) -> tuple[Flag, ...]:
        """The flags themselves."""
        if isinstance(self.flags, str):
            return GROUPS[self.flags]
        return tuple(flag for flag in flags() if flag.name in self.flags)


def _shared_experts(v: Namespace) -> bool:
    return bool(v.num_experts) and v.moe_shared_expert_intermediate_size is not None


IDLE: tuple[Idle, ...] = (
    Idle(moe.TITLE, lambda v: not v.num_experts, "without --num-experts"),
    Idle(moe_dispatch.TITLE, lambda v: not v.num_experts, "without --num-experts"),
    Idle(
        ("--moe-shared-expert-overlap",),
        lambda v: bool(v.num_experts) and not _shared_experts(v),
        "without --moe-shared-expert-intermediate-size",
    ),
    Idle(
        ("--moe-shared-expert-overlap",),
        lambda v: _shared_experts(v) and v.moe_token_dispatcher_type != "alltoall",
        "with another --moe-token-dispatcher-type than alltoall",
    ),
    Idle(
        ("--microbatch-group-size-per-virtual-pipeline-stage",),
        lambda v: v.virtual_pipeline_model_parallel_size is None,
        "without interleaving (--num-virtual-stages-per-pipeline-rank 2 or more)",
    ),
    Idle(
        ("--fsdp-double-buffer",),
        lambda v: v.sharding_strategy != "optim_grads_params",
        "without --data-parallel-sharding-strategy optim_grads_params",
    ),
    Idle(
        (
            "--loss-scale-window",
            "--hysteresis",
            "--initial-loss-scale",
            "--min-loss-scale",
        ),
        lambda v: not v.fp16,
        "without --fp16",
    ),
    Idle(("--mtp-loss-scaling-factor",), lambda v: not v.mtp_num_layers, "without --mtp-num-layers"),
    Idle(("--rope-scaling-factor",), lambda v: not v.use_rope_scaling, "without --use-rope-scaling"),
    Idle(
        ("--cp-comm-type",),
        lambda v: v.context_parallel_size == 1,
        "without --context-parallel-size 2 or more",
    ),
    Idle(("--sgd-momentum",), lambda v: v.optimizer != "sgd", "without --optimizer sgd"),
    Idle(
        ("--adam-beta1", "--adam-beta2", "--adam-eps"), lambda v: v.optimizer == "sgd", "with --optimizer sgd"
    ),
    Idle(
        ("--q-lora-rank", "--kv-lora-rank", "--qk-head-dim", "--qk-pos-emb-head-dim", "--v-head-dim"),
        lambda v: not v.multi_latent_attention,
        "without --multi-latent-attention",
    ),
    Idle(("--manual-gc-interval",), lambda v: not v.manual_gc, "without --manual-gc"),
    Idle(("--straggler-minmax-count",), lambda v: not v.log_straggler, "without --log-straggler"),
    Idle(
        ("--tensorboard-log-interval", "--tensorboard-queue-size"),
        lambda v: v.tensorboard_dir is None,
        "without --tensorboard-dir",
    ),
    Idle(
        ("--record-memory-history", "--empty-unused-memory-level"),
        lambda v: v.device != "cuda",
        "without a CUDA device",
    ),
    Idle(
        ("--memory-snapshot-path",), lambda v: not v.record_memory_history, "without --record-memory-history"
    ),
    Idle(
        ("--profile-step-start", "--profile-step-end", "--profile-ranks", "--use-pytorch-profiler"),
        lambda v: not v.profile,
        "without --profile",
    ),
)


def idle_flags(v: Namespace) -> list[str]:
    """A line for each need that is not met, naming the flags that wait for it. v: a resolved namespace."""
    lines: dict[str, list[str]] = {}
    for row in IDLE:
        if row.idle(v):
            given = [flag for flag in row.members() if _is_given(flag, v)]
            lines.setdefault(row.because, []).extend(spelled(flag, getattr(v, flag.dest)) for flag in given)
    return [
        f"{', '.join(dict.fromkeys(names))} {'have' if len(names) > 1 else 'has'} no effect {because}"
        for because, names in lines.items()
        if names
    ]


def _is_given(flag: Flag, v: Namespace) -> bool:
    return flag.status == "works" and flag.dest in v.explicit and is_given(flag, v)
