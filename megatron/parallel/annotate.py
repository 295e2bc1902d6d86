"""One typed record on a parameter: how its local tensor lies in the global one, and what its gradient still
lacks.

The record says nothing about data parallelism; FSDP copies it from the parameter that a layer made onto its
own parameters (attribute `parallel_annotation`), so it survives meta construction and sharding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

ATTRIBUTE = "parallel_annotation"


@dataclass(frozen=True)
class ParameterAnnotation:
    """Where a tensor-parallel-local parameter lies in its global tensor.

    Attributes:
        tensor_parallel_dim: dim that is cut over the tensor axis ("tp", or "etp" where `expert`); None:
            replicated.
        tensor_parallel_parts: the cut dim is this many parts one after the other, each cut on its own (gated
            fc1: 2, globally [gate; up], each rank holding its piece of both).
        replicated_gradient: "sum" where the parameter is replicated over the tensor axis but each rank
            computes only a part of its gradient (norms under sequence parallelism, q/k norms); "none" where
            it is complete.
        expert: belongs to an expert: cut over "etp", data parallel over "edp".
        num_global_rows: true number of rows (dim 0) of the global tensor where the local ones include padding
            (vocabulary); None: no padding. Padding rows are zero, belong to no checkpoint and are never
            updated.
        duplicate: another pipeline stage holds the same parameter (a tied embedding) and is the one that counts
            it in norms and numbers.
    """

    tensor_parallel_dim: int | None = None
    tensor_parallel_parts: int = 1
    replicated_gradient: Literal["sum", "none"] = "none"
    expert: bool = False
    num_global_rows: int | None = None
    duplicate: bool = False

    def __post_init__(self) -> None:
        if self.tensor_parallel_parts < 1:
            raise ValueError(f"tensor_parallel_parts must be at least 1, got {self.tensor_parallel_parts}")
        if self.tensor_parallel_dim is not None and self.replicated_gradient != "none":
            raise ValueError(
                "replicated_gradient applies to replicated parameters; this one is cut over the tensor axis"
            )

    @property
    def tensor_axis(self) -> str:
        """Name of the mesh axis that `tensor_parallel_dim` is cut over."""
        return "etp" if self.expert else "tp"


@dataclass(frozen=True)
class Chunk:
    """A box that a local tensor shares with its global tensor; one number per dim in each field."""

    local_offsets: tuple[int, ...]
    global_offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements in the box."""
        return math.prod(self.sizes)


def annotate(parameter: torch.Tensor, annotation: ParameterAnnotation) -> torch.Tensor:
    """Attach `annotation` to `parameter` and return the parameter."""
    setattr(parameter, ATTRIBUTE, annotation)
    return parameter


def annotation_of(parameter: torch.Tensor) -> ParameterAnnotation:
    """Return the annotation of `parameter`; an unannotated one is replicated with a complete gradient."""
    return getattr(parameter, ATTRIBUTE, None) or ParameterAnnotation()


def global_shape(annotation: ParameterAnnotation, local_shape: Sequence[int], size: int) -> tuple[int, ...]:
    """Shape of the global tensor (without padding rows) whose piece on each of `size` ranks has
    `local_shape`.
    """
    shape = _padded_global_shape(annotation, local_shape, size)
    if annotation.num_global_rows is not None:
        shape[0] = annotation.num_global_rows
    return tuple(shape)


def local_chunks(
    annotation: ParameterAnnotation, local_shape: Sequence[int], rank: int, size: int
) -> list[Chunk]:
    """Boxes that together are the local tensor (without padding rows), in local order.

    Args:
        annotation: of the parameter.
        local_shape: shape of this rank's tensor; must divide by `tensor_parallel_parts` along the cut dim.
        rank: position on the tensor axis (`annotation.tensor_axis`).
        size: size of that axis.
    """
    shape, dim, parts = tuple(local_shape), annotation.tensor_parallel_dim, annotation.tensor_parallel_parts
    zeros = (0,) * len(shape)
    if dim is None:
        boxes = [Chunk(zeros, zeros, shape)]
    else:
        length, remainder = divmod(shape[dim], parts)
        assert remainder == 0, f"dim {dim} of {shape} does not divide into {parts} parts"
        boxes = [
            Chunk(
                _replaced(zeros, dim, part * length),
                _replaced(zeros, dim, (part * size + rank) * length),
                _replaced(shape, dim, length),
            )
            for part in range(parts)
        ]
    if annotation.num_global_rows is None:
        return boxes
    return [box for box in (_without_padding(box, annotation.num_global_rows) for box in boxes) if box.numel]


def _padded_global_shape(annotation: ParameterAnnotation, local_shape: Sequence[int], size: int) -> list[int]:
    shape = list(local_shape)
    if annotation.tensor_parallel_dim is not None:
        shape[annotation.tensor_parallel_dim] *= size
    return shape


def _replaced(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    out = list(values)
    out[index] = value
    return tuple(out)


def _without_padding(box: Chunk, num_global_rows: int) -> Chunk:
    rows = max(0, min(box.sizes[0], num_global_rows - box.global_offsets[0]))
    return Chunk(box.local_offsets, box.global_offsets, _replaced(box.sizes, 0, rows))
