"""Muon: hidden matrices move by their orthogonalised momentum (https://kellerjordan.github.io/posts/muon, and
https://arxiv.org/abs/2502.16982 for its scale); embeddings, head, norms and biases by AdamW or Lion.

Note "Whole matrices". Orthogonalising needs the whole matrix. FSDP keeps each parameter on one shard
(FSDPConfig.tensor_atomic), so ranks of a data-parallel group share out the matrices and none does another's work.
Over tensor-parallel ranks, which hold the same parameters' pieces, the pieces are gathered and each rank keeps its own
of the result ("duplicated"; "distributed" gives the same), or each piece is taken for itself ("blockwise").

Note "Queries, keys, values". The rows of linear_qkv are three matrices that only lie in one tensor; each is
orthogonalised for itself unless --muon-no-split-qkv.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.parallel.annotate import annotation_of, global_shape, local_chunks
from megatron.parallel.mesh import ParallelMesh
from megatron.train.adam_states import (
    OwnUpdates,
    StateDtypes,
    adam_update,
    count_step,
    lion_update,
    own_parts,
)
from megatron.train.grad_norm import local_tensor

# Coefficients (a, b, c) of x -> a x + b x^3 + c x^5, one set a step, the last repeated: of Muon's author, of a tuned
# sequence, and of https://arxiv.org/abs/2505.16932.
COEFFICIENTS: Mapping[str, tuple[tuple[float, float, float], ...]] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
}
PRECISIONS = {"low": "medium", "medium": "high", "high": "highest"}
"""--muon-fp32-matmul-prec -> torch's word."""


@dataclass(frozen=True)
class MuonConfig:
    """Attributes are Megatron's flags without ``muon``.

    head_rows: (query rows of a group, key and value rows of a group each) of linear_qkv; None: never split.
    """

    momentum: float = 0.9
    nesterov: bool = False
    num_ns_steps: int = 5
    coefficient_type: str = "quintic"
    scale_mode: str = "spectral"
    extra_scale_factor: float = 1.0
    tp_mode: str = "duplicated"
    scalar_optimizer: str = "adam"
    fp32_matmul_prec: str = "medium"
    head_rows: tuple[int, int] | None = None
    lion_betas: tuple[float, float] = (0.95, 0.98)

    def __post_init__(self) -> None:
        if self.coefficient_type not in COEFFICIENTS:
            raise ValueError(
                f"--muon-coefficient-type {self.coefficient_type}: choose one of {', '.join(COEFFICIENTS)}"
            )
        if self.num_ns_steps < 1:
            raise ValueError(f"--muon-num-ns-steps {self.num_ns_steps}: give 1 or more")
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"--muon-momentum {self.momentum}: give a number in [0, 1)")


def orthogonalise(matrix: Tensor, config: MuonConfig) -> Tensor:
    """Move all singular values of `matrix` [rows, columns] towards one, by Newton-Schulz steps."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.t() if tall else matrix).to(torch.promote_types(matrix.dtype, torch.float32))
    x = x / x.norm().clamp(min=1e-7)
    sets = COEFFICIENTS[config.coefficient_type]
    for step in range(config.num_ns_steps):
        a, b, c = sets[min(step, len(sets) - 1)]
        square = x @ x.t()
        x = a * x + (b * square + c * square @ square) @ x
    return x.t() if tall else x


def scale_factor(rows: int, columns: int, mode: str) -> float:
    """What an orthogonalised update is multiplied by."""
    if mode == "shape_scaling":
        return max(1.0, rows / columns) ** 0.5
    return (max(rows, columns) if mode == "spectral" else rows / columns) ** 0.5


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon moves it: a hidden matrix."""
    outside = any(part in name for part in ("word_embeddings.", "position_embeddings.", "output_layer."))
    return parameter.dim() == 2 and not outside and min(parameter.shape) > 1


class Muon(OwnUpdates):
    """Groups are torch's for AdamW.

    Args:
        named: (name, parameter) of all parameters of the groups.
        mesh: whose tensor axes cut the matrices; None: none does.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        named: Iterable[tuple[str, Tensor]],
        config: MuonConfig,
        mesh: ParallelMesh | None,
        **options: Any,
    ) -> None:
        super().__init__([{"lion_betas": config.lion_betas, **group} for group in groups], **options)
        self.config, self._mesh = config, mesh
        self._names = {parameter: name for name, parameter in named if is_matrix(name, parameter)}

    def update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Muon, or what --muon-scalar-optimizer names."""
        if parameter in self._names:
            self._move(parameter, state, group)
        elif self.config.scalar_optimizer == "lion":
            lion_update(parameter, state, group)
        else:
            adam_update(parameter, state, group, StateDtypes())

    def _move(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)
        count_step(state)
        parts = own_parts(parameter)
        if parts is None:
            return
        own, grad = parts
        assert own.shape == parameter.shape, (
            f"{self._names[parameter]} is cut: FSDPConfig.tensor_atomic is needed"
        )
        momentum = local_tensor(state["momentum_buffer"])
        momentum.lerp_(grad.to(momentum.dtype), 1 - self.config.momentum)
        update = (
            grad.to(momentum.dtype).lerp(momentum, self.config.momentum) if self.config.nesterov else momentum
        )
        own.mul_(1 - group["lr"] * group["weight_decay"])
        own.sub_(self._direction(self._names[parameter], parameter, update).to(own.dtype), alpha=group["lr"])

    def _direction(self, name: str, parameter: Tensor, update: Tensor) -> Tensor:
        """The orthogonal direction of this rank's piece (note "Whole matrices")."""
        annotation = annotation_of(parameter)
        axis = annotation.tensor_axis
        size = 1 if self._mesh is None else self._mesh.size(axis)
        whole = size == 1 or annotation.tensor_parallel_dim is None or self.config.tp_mode == "blockwise"
        if whole or self._mesh is None:
            return self._by_part(name, update)
        pieces = [torch.empty_like(update) for _ in range(size)]
        dist.all_gather(pieces, update.contiguous(), group=self._mesh.group(axis))
        shape = tuple(update.shape)
        matrix = update.new_empty(global_shape(annotation, shape, size))
        for rank, piece in enumerate(pieces):
            for there, here in _boxes(annotation, shape, rank, size):
                matrix[there] = piece[here]
        matrix, out = self._by_part(name, matrix), torch.empty_like(update)
        for there, here in _boxes(annotation, shape, self._mesh.rank(axis), size):
            out[here] = matrix[there].to(out.dtype)
        return out

    def _by_part(self, name: str, matrix: Tensor) -> Tensor:
        """Orthogonalise a matrix, or its queries, keys and values each (note "Queries, keys, values")."""
        rows = self.config.head_rows
        if rows is None or "linear_qkv" not in name or matrix.shape[0] % (rows[0] + 2 * rows[1]):
            return self._orthogonal(matrix)
        groups = matrix.view(-1, rows[0] + 2 * rows[1], matrix.shape[1])
        parts = groups.split((rows[0], rows[1], rows[1]), dim=1)
        moved = [self._orthogonal(part.flatten(0, 1)).view_as(part) for part in parts]
        return torch.cat(moved, dim=1).view_as(matrix)

    def _orthogonal(self, matrix: Tensor) -> Tensor:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(PRECISIONS[self.config.fp32_matmul_prec])
        try:
            direction = orthogonalise(matrix, self.config)
        finally:
            torch.set_float32_matmul_precision(before)
        rows, columns = matrix.shape
        return direction * (
            scale_factor(rows, columns, self.config.scale_mode) * self.config.extra_scale_factor
        )


def _boxes(
    annotation: Any, shape: tuple[int, ...], rank: int, size: int
) -> list[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """(where in the whole matrix, where in the rank's piece) of each chunk."""
    boxes = []
    for chunk in local_chunks(annotation, shape, rank, size):
        there = tuple(slice(o, o + n) for o, n in zip(chunk.global_offsets, chunk.sizes, strict=True))
        here = tuple(slice(o, o + n) for o, n in zip(chunk.local_offsets, chunk.sizes, strict=True))
        boxes.append((there, here))
    return boxes
