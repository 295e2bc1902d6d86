"""Print which rank is where on the parallel axes, before any GPU is asked for.

python -m megatron.tools.show_mesh --world-size 16 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4
python -m megatron.tools.show_mesh --world-size 4096 --tensor-model-parallel-size 8 --rank 17
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from megatron.parallel.layout import AXES, DENSE_ORDER, EXPERT_ORDER, ParallelSizes, coordinates, group_ranks

MEANINGS = {
    "tp": "tensor parallel",
    "cp": "context parallel",
    "pp": "pipeline parallel",
    "dp": "data parallel",
    "dp_shard": "data parallel, inside an FSDP shard group",
    "dp_outer": "data parallel, replicas of the shard group (HSDP)",
    "dp_cp": "loss and gradients: data x context",
    "fsdp": "FSDP of dense parameters: dp_shard x cp",
    "tp_cp": "tensor x context",
    "tp_pp": "one copy of the dense model",
    "tp_dp_cp": "one pipeline stage",
    "world": "all ranks",
    "etp": "expert-tensor parallel",
    "ep": "expert parallel",
    "etp_ep": "one copy of a stage's experts",
    "etp_ep_pp": "one copy of all experts",
    "edp": "data parallel of experts",
    "edp_shard": "FSDP of expert parameters",
    "edp_outer": "replicas of the expert shard group",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse `arguments`, print the report; 2 with one line on stderr where the sizes do not fit."""
    options = _parser().parse_args(arguments)
    try:
        sizes = ParallelSizes.of_world(
            options.world_size,
            tensor=options.tensor_model_parallel_size,
            pipeline=options.pipeline_model_parallel_size,
            context=options.context_parallel_size,
            data_outer=options.num_distributed_optimizer_instances,
            expert=options.expert_model_parallel_size,
            expert_tensor=options.expert_tensor_parallel_size or options.tensor_model_parallel_size,
        )
        if options.rank is not None and not 0 <= options.rank < sizes.world:
            raise ValueError(f"--rank {options.rank}: ranks are 0 to {sizes.world - 1}")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(report_axes(sizes)))
    print()
    if options.rank is not None:
        print("\n".join(report_rank(sizes, options.rank)))
    else:
        print("\n".join(report_ranks(sizes, options.max_ranks)))
    return 0


def report_axes(sizes: ParallelSizes) -> list[str]:
    """Sizes and number of groups of every axis, a line each."""
    lines = [f"{sizes.world} ranks", f"{'axis':<10} {'size':>6} {'groups':>7}  what for"]
    for axis in AXES:
        size = sizes.size(axis)
        lines.append(f"{axis:<10} {size:>6} {sizes.world // size:>7}  {MEANINGS[axis]}")
    return lines


def report_rank(sizes: ParallelSizes, rank: int) -> list[str]:
    """The groups that `rank` is in, a line each."""
    lines = [f"rank {rank} is in the groups"]
    for axis in AXES:
        ranks = group_ranks(sizes, rank, axis)
        lines.append(f"{axis:<10} at {ranks.index(rank)} of [{_shorten(ranks)}]")
    return lines


def report_ranks(sizes: ParallelSizes, limit: int) -> list[str]:
    """Place of the first `limit` ranks on every base axis, a line each."""
    axes = (*DENSE_ORDER, *(axis for axis in EXPERT_ORDER if axis != "pp"))
    lines = ["rank " + " ".join(f"{axis:>9}" for axis in axes)]
    for rank in range(min(limit, sizes.world)):
        place = coordinates(sizes, rank, DENSE_ORDER) | coordinates(sizes, rank, EXPERT_ORDER)
        lines.append(f"{rank:>4} " + " ".join(f"{place[axis]:>9}" for axis in axes))
    if sizes.world > limit:
        lines.append(f"... {sizes.world - limit} more: --max-ranks, or --rank N for one rank's groups")
    return lines


def _shorten(ranks: list[int]) -> str:
    if len(ranks) <= 16:
        return ", ".join(map(str, ranks))
    return f"{', '.join(map(str, ranks[:4]))}, ... {ranks[-1]}; {len(ranks)} ranks"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="show_mesh", description=__doc__.splitlines()[0])
    parser.add_argument("--world-size", type=int, required=True, help="number of processes")
    for name in ("tensor-model", "pipeline-model", "context", "expert-model"):
        parser.add_argument(f"--{name}-parallel-size", type=int, default=1)
    parser.add_argument("--expert-tensor-parallel-size", type=int, help="default: the tensor-parallel size")
    parser.add_argument("--num-distributed-optimizer-instances", type=int, default=1, help="outer data axis")
    parser.add_argument("--rank", type=int, help="show the groups of this rank")
    parser.add_argument("--max-ranks", type=int, default=64, help="ranks to list (default 64)")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
