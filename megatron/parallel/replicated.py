"""Gradients of parameters that every tensor-parallel rank holds but only computes a part of: summed once per
step.

Norms and biases under sequence parallelism see a piece of the sequence, q/k norms a part of the heads; their
annotation says replicated_gradient="sum". The sum is made once, on what the data-parallel reduction left (in
the main-grad dtype), by one all-reduce for all of them; replicas stay bit-identical because every rank gets
the same sum.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.profiler import record_function

from megatron.parallel.annotate import ParameterAnnotation
from megatron.parallel.collectives import launch_all_reduce
from megatron.parallel.mesh import ParallelMesh


@torch.no_grad()
def sum_replicated_gradients(
    gradients: Iterable[tuple[ParameterAnnotation, Tensor]], mesh: ParallelMesh
) -> None:
    """Sum, in place, the gradients that are partial over the tensor axis; call it once per step.

    Args:
        gradients: (annotation, this rank's gradient or its FSDP shard, a plain tensor) of every parameter, in
            the same order on all ranks of the tensor axis. Those that are complete are left alone.
        mesh: gives the groups.
    """
    partial: dict[tuple[str, torch.dtype], list[Tensor]] = {}
    for annotation, gradient in gradients:
        if annotation.replicated_gradient == "sum" and mesh.size(annotation.tensor_axis) > 1:
            partial.setdefault((annotation.tensor_axis, gradient.dtype), []).append(gradient)
    for (axis, _), tensors in partial.items():
        with record_function(f"parallel.sum_replicated {axis}"):
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            launch_all_reduce(flat, mesh.group(axis)).wait()
            for tensor, total in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
                tensor.copy_(total.view(tensor.shape))
