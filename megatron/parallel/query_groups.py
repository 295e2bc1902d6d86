"""Who computes which attention heads: grouped queries over tensor-parallel ranks, also with fewer groups than ranks.

Note "Shared groups": the rows of linear_qkv go by group: its query heads, its key, its value. With at least as many
groups as ranks a rank's rows are whole groups. With fewer, size / groups ranks share one: each holds an equal piece of
the group's rows, wherever that cuts; together they gather the group's projections, each takes the key and the value
and its share of the query heads. The gather's backward sums what the sharers' heads give to the key and the value. So
the weight stays one tensor cut into equal rows, as every other column-cut weight.
"""

from __future__ import annotations

from torch import Tensor

from megatron.parallel.collectives import all_gather
from megatron.parallel.mesh import ParallelMesh


class QueryGroups:
    """The heads of one rank.

    Args:
        num_heads, num_groups: of the whole model (--num-attention-heads, --num-query-groups).
        head_dim: channels of a head (--kv-channels).
        mesh: gives the tensor-parallel size and the group of sharers; every rank must make one at the same point.
        gated: each query head has a gate of as many channels (a group's rows: queries, gates, key, value).

    Raises ValueError, naming the flags, where heads and groups cannot be shared out.
    """

    def __init__(
        self, num_heads: int, num_groups: int, head_dim: int, mesh: ParallelMesh, *, gated: bool = False
    ) -> None:
        size = mesh.size("tp")
        _check(num_heads, num_groups, size, head_dim * (num_heads * (2 if gated else 1) + 2 * num_groups))
        self._gated = gated
        self.head_dim, self.heads_per_group = head_dim, num_heads // num_groups
        self.local_heads = num_heads // size
        self.local_groups = max(1, num_groups // size)
        sharers = max(1, size // num_groups)
        self._share = mesh.rank("tp") % sharers
        blocks = [range(first, first + sharers) for first in range(0, size, sharers)]
        self._sharers = mesh.partition("tp", blocks) if sharers > 1 else None

    def split(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Output of linear_qkv on this rank [s, b, rows] -> query [s, b, heads, d], key and value [s, b, groups, d],
        and the gate of the heads' outputs [s, b, heads * d], or None.
        """
        dim, per_group = self.head_dim, self.heads_per_group
        mixed = all_gather(mixed, self._sharers, dim=-1)
        rows = per_group * dim
        if not self._gated:
            mixed = mixed.unflatten(-1, (self.local_groups, rows + 2 * dim))
            query, key, value = mixed.split((rows, dim, dim), dim=-1)
            return self._own(query), key, value, None
        mixed = mixed.unflatten(-1, (self.local_groups, 2 * rows + 2 * dim))
        query, gate, key, value = mixed.split((rows, rows, dim, dim), dim=-1)
        return self._own(query), key, value, self._own(gate).flatten(2)

    def _own(self, heads: Tensor) -> Tensor:
        """This rank's share of its groups' heads: [s, b, groups, rows] -> [s, b, heads, d]."""
        heads = heads.unflatten(-1, (self.heads_per_group, self.head_dim)).flatten(2, 3)
        if self._sharers is not None:
            heads = heads.narrow(2, self._share * self.local_heads, self.local_heads)
        return heads


def _check(num_heads: int, num_groups: int, size: int, rows: int) -> None:
    if num_heads % num_groups:
        raise ValueError(
            f"--num-attention-heads {num_heads} does not divide by --num-query-groups {num_groups}"
        )
    if num_heads % size:
        raise ValueError(
            f"--num-attention-heads {num_heads} does not divide by --tensor-model-parallel-size {size}"
        )
    if num_groups % size and size % num_groups:
        raise ValueError(
            f"--num-query-groups {num_groups} and --tensor-model-parallel-size {size}: one must divide the other"
        )
    if rows % size:
        raise ValueError(
            f"the {rows} rows of linear_qkv ((--num-attention-heads {num_heads} + 2 * --num-query-groups "
            f"{num_groups}) * --kv-channels) do not divide by --tensor-model-parallel-size {size}"
        )
