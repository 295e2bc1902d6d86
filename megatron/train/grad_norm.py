"""Norms and counts over sharded tensors: every element of the whole model counts exactly once.

Note "Who counts": a tensor is counted by the ranks that hold its shards, and of those that hold the same
piece only by the first. Copies over FSDP axes are known from the DTensor's placements, copies over the
tensor-parallel axis from the parameter's annotation. So one sum over all ranks of the world is the sum over
the model, for dense and expert parameters on whatever meshes, in one collective.

Note "Precision": torch's fp32 vector_norm is off by 1.6e-4 on 4 M elements (CPU, torch 2.13), its fp64
accumulation takes 5 times as long. Norms of chunks of 1024, squared and summed in fp64, are good to 3e-10
at no cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from megatron.parallel.annotate import annotation_of
from megatron.parallel.flight import Recorded
from megatron.parallel.mesh import ParallelMesh

_CHUNK = 1024


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def counts_here(parameter: Tensor, mesh: ParallelMesh) -> bool:
    """Whether this rank counts what it holds of `parameter` (note "Who counts")."""
    annotation = annotation_of(parameter)
    if annotation.duplicate:
        return False
    if annotation.tensor_parallel_dim is None and mesh.rank(annotation.tensor_axis) != 0:
        return False
    if not isinstance(parameter, DTensor):
        return mesh.rank("edp" if annotation.expert else "dp_cp") == 0
    outer = "edp_outer" if annotation.expert else "dp_outer"
    # Where both views have the same groups, experts share the buffers, and so the mesh, of the dense parameters.
    cut_by_outer = {"edp_outer", "dp_outer"} & set(parameter.device_mesh.mesh_dim_names or ())
    if not cut_by_outer and mesh.rank(outer) != 0:
        return False  # hybrid sharding: the mesh of the DTensor is one of several replicas
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank holds a parameter of a mesh that it is not part of"
    return not any(
        isinstance(placement, Replicate) and position != 0
        for placement, position in zip(parameter.placements, coordinate, strict=True)
    )


def sum_of_squares(tensors: Iterable[Tensor], device: torch.device | str = "cpu") -> Tensor:
    """Sum of the squares of all elements of this rank's parts, as an fp64 scalar on `device`."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for tensor in tensors:
        flat = local_tensor(tensor).detach().reshape(-1)
        whole = flat.numel() // _CHUNK * _CHUNK
        if whole:
            norms = torch.linalg.vector_norm(flat[:whole].view(-1, _CHUNK), dim=1)
            total += norms.double().square().sum()
        if whole < flat.numel():
            total += flat[whole:].double().square().sum()
    return total


def count_zeros(tensors: Iterable[Tensor], device: torch.device | str = "cpu") -> Tensor:
    """Number of elements of this rank's parts that are exactly zero, as an fp64 scalar on `device`."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for tensor in tensors:
        local = local_tensor(tensor).detach()
        total += local.numel() - torch.count_nonzero(local)
    return total


def num_padding_elements(parameters: Iterable[Tensor], mesh: ParallelMesh) -> int:
    """Elements of padding rows (vocabulary) in the whole model. Their gradients are zero; they are not
    counted.
    """
    total = 0
    for parameter in parameters:
        annotation = annotation_of(parameter)
        if annotation.num_global_rows is None or annotation.duplicate:
            continue
        size = 1 if annotation.tensor_parallel_dim is None else mesh.size(annotation.tensor_axis)
        rows = parameter.shape[0] * size - annotation.num_global_rows
        total += rows * math.prod(parameter.shape[1:])
    return total


class GradientStatistics:
    """Norm and zeros of all gradients of a model, split into this rank's part and the sum over ranks.

    The two halves let a training step put its own numbers into the same collective (megatron/train/step.py).

    Args:
        parameters: all trainable parameters of this rank, as the optimizer sees them.
        mesh: of the run.
        with_zeros: also count zeros.
    """

    def __init__(self, parameters: Sequence[Tensor], mesh: ParallelMesh, *, with_zeros: bool = False) -> None:
        self.counted = [parameter for parameter in parameters if counts_here(parameter, mesh)]
        self.with_zeros = with_zeros
        # The padding of all stages and tensor ranks is taken off once, by the rank that is first on all axes.
        first = mesh.rank("tp") == 0 and mesh.rank("dp_cp") == 0
        self.padding = num_padding_elements(parameters, mesh) if first and with_zeros else 0

    def local(self, device: torch.device | str = "cpu") -> Tensor:
        """[sum of squares, zeros] of what this rank counts: fp64, to be summed over the world."""
        gradients = [parameter.grad for parameter in self.counted if parameter.grad is not None]
        zeros = torch.zeros((), dtype=torch.float64, device=device)
        if self.with_zeros:
            zeros = count_zeros(gradients, device) - self.padding
        return torch.stack([sum_of_squares(gradients, device), zeros])


def total_norm(
    tensors: Sequence[tuple[Tensor, Tensor | None]],
    mesh: ParallelMesh,
    *,
    norm_type: float = 2.0,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Norm over the whole model of one tensor per parameter; one collective over the world.

    Args:
        tensors: (parameter, its tensor to take the norm of: itself, its gradient, or None).
        mesh: of the run.
        norm_type: 2.0 or math.inf.
        device: where the result lies.

    Returns: an fp64 scalar, the same on all ranks.
    """
    counted = [tensor for parameter, tensor in tensors if tensor is not None and counts_here(parameter, mesh)]
    group = mesh.group("world")
    if norm_type == 2.0:
        total = sum_of_squares(counted, device)
        if group is not None:
            with Recorded("all_reduce", group, (total,), "a norm"):
                dist.all_reduce(total, group=group)
        return total.sqrt()
    if norm_type != math.inf:
        raise ValueError(f"norm_type {norm_type} is not supported; use 2.0 or math.inf")
    largest = torch.zeros((), dtype=torch.float64, device=device)
    for tensor in counted:
        local = local_tensor(tensor).detach()
        if local.numel():
            largest = torch.maximum(largest, local.abs().max().double())
    if group is not None:
        with Recorded("all_reduce", group, (largest,), "a norm"):
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest


def parameter_norm(
    parameters: Sequence[Tensor], mesh: ParallelMesh, device: torch.device | str = "cpu"
) -> Tensor:
    """L2 norm of the main parameters, which are what the optimizer wrote last (never a stale gathered
    copy).
    """
    return total_norm([(parameter, parameter) for parameter in parameters], mesh, device=device)


def clip_coefficient(norm: float, max_norm: float) -> float:
    """Factor that brings gradients of `norm` to at most `max_norm`; 1 where `max_norm` is 0 (no clipping).

    The 1e-6 is Megatron's and torch.nn.utils.clip_grad_norm_'s.
    """
    if max_norm <= 0.0:
        return 1.0
    return min(1.0, max_norm / (norm + 1e-6))
