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
