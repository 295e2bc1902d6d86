"""What the sizes of experts and their layout must be: checked on resolved values (see limits.py)."""

from __future__ import annotations

import importlib.util
import sys
from argparse import Namespace

from megatron.train.arguments.ranges import check_multiple


def check_experts(v: Namespace) -> None:
    """Raises ValueError naming flags, values and the fix. v: a resolved namespace."""
    experts = v.num_experts
    if experts is None:
        return
    if experts < 1:
        raise ValueError(f"--num-experts {experts}: give 1 or more")
    if not 1 <= v.moe_router_topk <= experts:
        raise ValueError(
            f"--moe-router-topk {v.moe_router_topk}: choose between 1 and --num-experts {experts}"
        )
    size, tensor = v.expert_model_parallel_size, v.expert_tensor_parallel_size
    check_multiple("--num-experts", experts, f"--expert-model-parallel-size {size}", size)
    check_multiple(
        "--moe-ffn-hidden-size", v.moe_ffn_hidden_size, f"--expert-tensor-parallel-size {tensor}", tensor
    )
    if v.moe_shared_expert_intermediate_size is not None:
        check_multiple(
            "--moe-shared-expert-intermediate-size",
            v.moe_shared_expert_intermediate_size,
            f"--tensor-model-parallel-size {v.tensor_model_parallel_size}",
            v.tensor_model_parallel_size,
        )
    _grid(v)
    _flex(v)
    _groups(v)
    pattern = v.moe_layer_freq
    if isinstance(pattern, list) and len(pattern) != v.num_layers:
        raise ValueError(
            f"--moe-layer-freq describes {len(pattern)} layers, but --num-layers is {v.num_layers}: "
            "make them equal"
        )
    kinds, weights = v.moe_router_load_balancing_type, v.moe_aux_loss_coeff
    if isinstance(kinds, list) and (not isinstance(weights, list) or len(kinds) != len(weights)):
        raise ValueError(
            f"--moe-router-load-balancing-type has {len(kinds)} values: give --moe-aux-loss-coeff as many"
        )


def _grid(v: Namespace) -> None:
    size, tensor = v.expert_model_parallel_size, v.expert_tensor_parallel_size
    grid = size * tensor * v.pipeline_model_parallel_size
    if v.world_size % grid:
        raise ValueError(
            f"{v.world_size} ranks cannot hold --expert-model-parallel-size {size} x "
            "--expert-tensor-parallel-size "
            f"{tensor} x --pipeline-model-parallel-size {v.pipeline_model_parallel_size}: "
            f"start a multiple of {grid} ranks or lower one of them"
        )
    copies, outer = v.world_size // grid, v.num_distributed_optimizer_instances
    if copies % outer:
        raise ValueError(
            f"--num-distributed-optimizer-instances {outer} does not divide the {copies} copies of "
            "each expert: "
            "lower it or --expert-model-parallel-size"
        )


def _flex(v: Namespace) -> None:
    if v.moe_token_dispatcher_type != "flex":
        return
    other = "--moe-token-dispatcher-type alltoall"
    if v.expert_model_parallel_size == 1:
        raise ValueError(
            "--moe-token-dispatcher-type flex with --expert-model-parallel-size 1: it needs 2 or more; raise "
            f"it, or use {other}"
        )
    if v.expert_tensor_parallel_size > 1:
        raise ValueError(
            "--moe-token-dispatcher-type flex with --expert-tensor-parallel-size "
            f"{v.expert_tensor_parallel_size}: add --expert-tensor-parallel-size 1, or use {other}"
        )


def missing_library(v: Namespace) -> str | None:
    """What the flex dispatcher lacks on this machine; None: nothing. v: a namespace, resolved or not."""
    if not v.num_experts or v.moe_token_dispatcher_type != "flex" or _is_installed("deep_ep"):
        return None
    return (
        f"--moe-flex-dispatcher-backend {v.moe_flex_dispatcher_backend} needs the package deep_ep, which is not "
        "installed: install it (it needs NVLink or RDMA), or use --moe-token-dispatcher-type alltoall"
    )


def _is_installed(package: str) -> bool:
    return package in sys.modules or importlib.util.find_spec(package) is not None


def _groups(v: Namespace) -> None:
    experts, groups = v.num_experts, v.moe_router_num_groups
    if groups is None:
        return
    check_multiple("--num-experts", experts, f"--moe-router-num-groups {groups}", groups)
    if not 1 <= v.moe_router_group_topk <= groups:
        raise ValueError(
            f"--moe-router-group-topk {v.moe_router_group_topk}: choose between 1 and "
            f"--moe-router-num-groups {groups}"
        )
    if v.moe_router_topk > v.moe_router_group_topk * (experts // groups):
        raise ValueError(
            f"--moe-router-topk {v.moe_router_topk} is more than --moe-router-group-topk "
            f"{v.moe_router_group_topk} groups of {experts // groups} experts hold: lower it"
        )
