"""Who is where: sizes of the parallel axes -> coordinates and group members. PURE, plain integers.

Note "Rank order": Megatron's. Tensor is fastest, then context, then data (dp_shard, dp_outer), pipeline is
slowest.
The same ranks seen by experts: expert-tensor fastest, then expert, then expert-data (edp_shard, edp_outer),
pipeline. The outer data axis has the same size in both views and is slowest but for pipeline, so that it cuts
both views alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Fastest axis first (note "Rank order").
DENSE_ORDER = ("tp", "cp", "dp_shard", "dp_outer", "pp")
EXPERT_ORDER = ("etp", "ep", "edp_shard", "edp_outer", "pp")

# Every axis that a group can be asked for: (base axes fastest first, the view they belong to).
AXES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "tp": (("tp",), DENSE_ORDER),
    "cp": (("cp",), DENSE_ORDER),
    "pp": (("pp",), DENSE_ORDER),
    "dp": (("dp_shard", "dp_outer"), DENSE_ORDER),
    "dp_shard": (("dp_shard",), DENSE_ORDER),
    "dp_outer": (("dp_outer",), DENSE_ORDER),
    "dp_cp": (("cp", "dp_shard", "dp_outer"), DENSE_ORDER),
    "fsdp": (("cp", "dp_shard"), DENSE_ORDER),
    "tp_cp": (("tp", "cp"), DENSE_ORDER),
    "tp_pp": (("tp", "pp"), DENSE_ORDER),
    "tp_dp_cp": (("tp", "cp", "dp_shard", "dp_outer"), DENSE_ORDER),
    "world": (DENSE_ORDER, DENSE_ORDER),
    "etp": (("etp",), EXPERT_ORDER),
    "ep": (("ep",), EXPERT_ORDER),
    "etp_ep": (("etp", "ep"), EXPERT_ORDER),
    "etp_ep_pp": (("etp", "ep", "pp"), EXPERT_ORDER),
    "edp": (("edp_shard", "edp_outer"), EXPERT_ORDER),
    "edp_shard": (("edp_shard",), EXPERT_ORDER),
    "edp_outer": (("edp_outer",), EXPERT_ORDER),
}


@dataclass(frozen=True)
class ParallelSizes:
    """Sizes of the parallel axes; world = tensor * context * pipeline * data.

    Attributes:
        tensor, pipeline, context, data: --tensor-model-parallel-size and so on; data includes data_outer.
        data_outer: replicas of the FSDP shard group (HSDP); divides data.
        expert, expert_tensor: of the expert view; expert-data = world / (expert_tensor * expert * pipeline).

    Raises ValueError, naming the sizes, where they do not fit each other.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    data: int = 1
    data_outer: int = 1
    expert: int = 1
    expert_tensor: int = 1

    def __post_init__(self) -> None:
        for field in self.__dataclass_fields__:
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"parallel size {field}={value!r}: give an integer of at least 1")
        if self.data % self.data_outer:
            raise ValueError(
                f"data_outer={self.data_outer} does not divide data={self.data}: choose an outer "
                "size (--num-distributed-optimizer-instances) that divides the data-parallel one"
            )
        stage, experts = self.world // self.pipeline, self.expert * self.expert_tensor
        if stage % experts:
            raise ValueError(
                f"expert={self.expert} * expert_tensor={self.expert_tensor} = {experts} does not divide the "
                f"{stage} ranks of a pipeline stage (tensor={self.tensor} * context={self.context} * "
                f"data={self.data}): lower --expert-model-parallel-size or --expert-tensor-parallel-size"
            )
        if (stage // experts) % self.data_outer:
            raise ValueError(
                f"data_outer={self.data_outer} does not divide the expert-data size {stage // experts} "
                f"(= {stage} ranks / (expert={self.expert} * expert_tensor={self.expert_tensor})): the outer "
                "axis of dense and expert parameters is the same"
            )

    @classmethod
    def of_world(
        cls, world: int, *, tensor: int = 1, pipeline: int = 1, context: int = 1, **others: int
    ) -> ParallelSizes:
        """Sizes for `world` ranks: what tensor, pipeline and context leave is data parallel."""
        model = tensor * pipeline * context
        if world % model:
            raise ValueError(
                f"world size {world} does not divide by tensor={tensor} * pipeline={pipeline} * "
                f"context={context} = {model}: start a multiple of {model} processes or lower one of "
                "--tensor-model-parallel-size, --pipeline-model-parallel-size, --context-parallel-size"
            )
        return cls(tensor=tensor, pipeline=pipeline, context=context, data=world // model, **others)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tensor * self.context * self.data * self.pipeline

    @property
    def expert_data(self) -> int:
        """Size of the expert-data axis (edp = edp_shard * edp_outer)."""
        return self.world // (self.pipeline * self.expert * self.expert_tensor)

    def base_size(self, axis: str) -> int:
        """Size of one of the base axes of DENSE_ORDER or EXPERT_ORDER."""
        return {
            "tp": self.tensor,
            "cp": self.context,
            "dp_shard": self.data // self.data_outer,
            "dp_outer": self.data_outer,
            "pp": self.pipeline,
            "etp": self.expert_tensor,
            "ep": self.expert,
            "edp_shard": self.expert_data // self.data_outer,
            "edp_outer": self.data_outer,
        }[axis]

    def size(self, axis: str) -> int:
        """Size of any axis of AXES."""
        return math.prod(self.base_size(base) for base in _lookup(axis)[0])


def coordinates(sizes: ParallelSizes, rank: int, order: tuple[str, ...]) -> dict[str, int]:
    """Position of global `rank` on each base axis of a view (DENSE_ORDER or EXPERT_ORDER)."""
    assert 0 <= rank < sizes.world, f"rank {rank} of {sizes.world}"
    position = {}
    for axis in order:
        rank, position[axis] = divmod(rank, sizes.base_size(axis))
    return position


def axis_rank(sizes: ParallelSizes, rank: int, axis: str) -> int:
    """Position of global `rank` in its group of `axis`."""
    bases, order = _lookup(axis)
    position = coordinates(sizes, rank, order)
    index = 0
    for base in reversed(bases):
        index = index * sizes.base_size(base) + position[base]
    return index


def group_ranks(sizes: ParallelSizes, rank: int, axis: str) -> list[int]:
    """Global ranks of the group of `axis` that `rank` is in, by their position in it (ascending global
    rank).
    """
    bases, order = _lookup(axis)
    position = coordinates(sizes, rank, order)
    strides, stride = {}, 1
    for base in order:
        strides[base] = stride
        stride *= sizes.base_size(base)
    members = [rank - sum(position[base] * strides[base] for base in bases)]
    for base in reversed(bases):
        members = [member + i * strides[base] for member in members for i in range(sizes.base_size(base))]
    return sorted(members)


def all_groups(sizes: ParallelSizes, axis: str) -> list[list[int]]:
    """Every group of `axis`, by lowest member."""
    return [group_ranks(sizes, r, axis) for r in range(sizes.world) if axis_rank(sizes, r, axis) == 0]


def _lookup(axis: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if axis not in AXES:
        raise ValueError(f"unknown axis {axis!r}; the axes are {', '.join(AXES)}")
    return AXES[axis]
