"""What overlaps of experts' communication need."""

from __future__ import annotations

from argparse import Namespace


def check_overlap(v: Namespace) -> None:
    """Raise ValueError, naming the flag, for what a forward that takes turns with a backward cannot have.

    v: a resolved namespace.
    """
    if not v.overlap_moe_expert_parallel_comm:
        return
    recompute = v.recompute_granularity
    for broken, needed in (
        (v.moe_token_dispatcher_type != "alltoall", "--moe-token-dispatcher-type alltoall"),
        (v.pipeline_model_parallel_size > 1, "--pipeline-model-parallel-size 1"),
        (
            recompute == "full" or (recompute == "selective" and "moe" in v.recompute_modules),
            "experts that are not recomputed",
        ),
    ):
        if broken:
            raise ValueError(
                f"--overlap-moe-expert-parallel-comm needs {needed}: change that, or drop the flag"
            )


def idle_flags(v: Namespace) -> list[str]:
    """A line for each flag of an overlap or an interleaving that has no effect. v: a resolved namespace."""
    lines = []
    if v.moe_shared_expert_overlap:
        kind, width = v.moe_token_dispatcher_type, v.moe_shared_expert_intermediate_size
        if not v.num_experts or width is None:
            lines.append(
                "--moe-shared-expert-overlap has no effect without --num-experts and "
                "--moe-shared-expert-intermediate-size"
            )
        elif kind != "alltoall":
            lines.append(
                f"--moe-shared-expert-overlap has no effect with --moe-token-dispatcher-type {kind}: use alltoall"
            )
    size = v.microbatch_group_size_per_vp_stage
    if size is not None and v.virtual_pipeline_model_parallel_size is None:
        lines.append(
            f"--microbatch-group-size-per-virtual-pipeline-stage {size} has no effect without interleaving "
            "(--num-virtual-stages-per-pipeline-rank 2 or more)"
        )
    return lines
