"""Dispatchers: bring each token's copies to the ranks of its experts, and the weighted sum of the outputs back.

Note "The protocol". `dispatch(tokens, routing)` gives the rows of this rank's experts, sorted by expert, how many
each has, and a function that takes the experts' outputs of these rows and gives every token its weighted sum. All
that a call needs lies in its result: recompute, several microbatches in flight and several layers may share one
dispatcher.

Note "Grid". The ranks that hold one layer's experts are ep x etp, etp fastest. Every rank of the grid comes with
tokens of its own (also the ranks of one tensor-parallel group). An expert lives on the etp ranks of one ep rank,
each with a part of its inner channels: all of them need its tokens, and what they return are partial sums.

Note "Weights stay". The routing weights are applied where the tokens come from (all-gather: in the precision of
the router), so that they never travel in a narrower dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.parallel.collectives import (
    Exchange,
    all_gather,
    all_to_all,
    launch_all_gather,
    reduce_scatter,
)
from megatron.parallel.expert import permute as p
from megatron.parallel.expert.permute import Routing
from megatron.parallel.mesh import ParallelMesh


@dataclass(frozen=True)
class ExpertGrid:
    """One layer's experts over the ranks (note "Grid").

    Attributes:
        num_experts: of the whole layer.
        ep, etp, both: groups, None where they have one member; `both` is ep x etp, etp fastest.
        ep_rank, ep_size, etp_rank, etp_size: this rank's place.
    """

    num_experts: int
    ep: ProcessGroup | None = None
    etp: ProcessGroup | None = None
    both: ProcessGroup | None = None
    ep_rank: int = 0
    ep_size: int = 1
    etp_rank: int = 0
    etp_size: int = 1

    @classmethod
    def of_mesh(cls, num_experts: int, mesh: ParallelMesh) -> ExpertGrid:
        """The grid of a mesh; ValueError where the experts do not divide."""
        size = mesh.size("ep")
        if num_experts % size:
            raise ValueError(
                f"--num-experts {num_experts} is not a multiple of --expert-model-parallel-size {size}: "
                f"take {num_experts // size * size + size}, or lower the other side"
            )
        return cls(
            num_experts,
            mesh.group("ep"),
            mesh.group("etp"),
            mesh.group("etp_ep"),
            mesh.rank("ep"),
            size,
            mesh.rank("etp"),
            mesh.size("etp"),
        )

    @property
    def num_local(self) -> int:
        """Experts of this rank."""
        return self.num_experts // self.ep_size

    @property
    def first(self) -> int:
        """Number of this rank's first expert."""
        return self.ep_rank * self.num_local

    def experts_of(self, ep_rank: int) -> slice:
        """The experts of another rank."""
        return slice(ep_rank * self.num_local, (ep_rank + 1) * self.num_local)


@dataclass(frozen=True)
class Dispatched:
    """What this rank's experts work on.

    Attributes:
        rows: [n, h], sorted by expert.
        splits: rows of each of this rank's experts; any may be 0.
        combine: outputs of the rows [n, h] -> [tokens, h] of this rank, in the dtype of its tokens.
    """

    rows: Tensor
    splits: list[int]
    combine: Callable[[Tensor], Tensor]


def nothing() -> None:
    """What there is to do meanwhile."""


class Dispatcher(Protocol):
    """See note "The protocol"."""

    grid: ExpertGrid

    def dispatch(
        self, tokens: Tensor, routing: Routing, meanwhile: Callable[[], None] = nothing
    ) -> Dispatched:
        """tokens: [t, h] of this rank. Collective over the grid.

        meanwhile: called once, where a dispatcher can while the tokens travel.
        """


class AllToAllDispatcher:
    """Sends only the copies that are needed: all-to-all over ep, then a gather over etp where there is one.

    One host wait a call (how many rows come from where), none where the routing has a capacity.

    Attributes:
        switch: called before each wait for rows, in forward and backward (megatron/parallel/interleave.py).
    """

    def __init__(self, grid: ExpertGrid) -> None:
        self.grid = grid
        self.switch: Callable[[], None] | None = None

    def dispatch(
        self, tokens: Tensor, routing: Routing, meanwhile: Callable[[], None] = nothing
    ) -> Dispatched:
        """See `Dispatcher.dispatch`."""
        grid, topk = self.grid, routing.topk
        counts = self._counts(routing)
        if routing.capacity is not None:
            slot = p.slots(routing)
            rows = p.permute_padded(tokens, slot, topk, grid.num_experts * routing.capacity)
            back: Callable[[Tensor], Tensor] = lambda out: p.unpermute_padded(out, slot, routing.weights)
        else:
            own = counts[grid.ep_rank * grid.etp_size + grid.etp_rank]
            order = p.expert_order(routing.experts)[: sum(own)]
            rows = p.permute(tokens, order, topk)
            back = lambda out: p.unpermute(out, order, routing.weights)
        route = _Route(grid, counts, self.switch)
        there = route.forth(rows, meanwhile)
        return Dispatched(there, route.splits, lambda out: back(route.back(out)).to(tokens.dtype))

    def _counts(self, routing: Routing) -> list[list[int]]:
        """Rows from each rank of the grid for each expert."""
        grid, size = self.grid, self.grid.ep_size * self.grid.etp_size
        if routing.capacity is not None:
            return [[routing.capacity] * grid.num_experts] * size
        counts = p.tokens_per_expert(routing.experts, grid.num_experts)
        return launch_all_gather(counts, grid.both).wait().view(size, grid.num_experts).tolist()


class _Route:
    """The way of one call's rows, from counts[rank of the grid][expert]."""

    def __init__(self, grid: ExpertGrid, counts: list[list[int]], switch: Callable[[], None] | None) -> None:
        self.grid, self._switch = grid, switch
        mine = grid.experts_of(grid.ep_rank)
        rank = lambda ep, etp: counts[ep * grid.etp_size + etp]
        own, sources = rank(grid.ep_rank, grid.etp_rank), range(grid.ep_size)
        self.sent = [sum(own[grid.experts_of(ep)]) for ep in sources]
        self.received = [sum(rank(ep, grid.etp_rank)[mine]) for ep in sources]
        self.lengths = [
            sum(sum(rank(ep, etp)[mine]) for ep in sources) for etp in range(grid.etp_size)
        ]  # rows that each etp rank received
        # The rows lie by (etp, ep, expert); experts want (expert, etp, ep).
        self.chunks = [
            count for etp in range(grid.etp_size) for ep in sources for count in rank(ep, etp)[mine]
        ]
        blocks, local = grid.etp_size * grid.ep_size, grid.num_local
        self.order = [block * local + expert for expert in range(local) for block in range(blocks)]
        self.sorted_already = local == 1 or blocks == 1
        self.splits = [sum(self.chunks[expert::local]) for expert in range(local)]

    def forth(self, rows: Tensor, meanwhile: Callable[[], None]) -> Tensor:
        """Rows by expert of the whole layer -> rows of this rank's experts."""
        exchange = Exchange(rows, self.grid.ep, self.received, self.sent, self._switch)
        meanwhile()
        rows = exchange.wait()
        rows = gather_uneven(rows, self.grid.etp, self.lengths)
        return rows if self.sorted_already else p.sort_chunks(rows, self.chunks, self.order)

    def back(self, rows: Tensor) -> Tensor:
        """Outputs of this rank's experts (over etp partial sums) -> outputs of the rows that were sent."""
        if not self.sorted_already:
            sizes = [self.chunks[index] for index in self.order]
            rows = p.sort_chunks(rows, sizes, p.inverse_order(self.order))
        rows = reduce_scatter_uneven(rows, self.grid.etp, self.lengths, self.grid.etp_rank)
        return Exchange(rows, self.grid.ep, self.sent, self.received, self._switch).wait()


class AllGatherDispatcher:
    """Gathers the tokens of the whole grid; each rank takes what its experts need. For few experts or small grids.

    All ranks must come with equally many tokens. One host wait a call.
    """

    def __init__(self, grid: ExpertGrid) -> None:
        self.grid = grid

    def dispatch(
        self, tokens: Tensor, routing: Routing, meanwhile: Callable[[], None] = nothing
    ) -> Dispatched:
        """See `Dispatcher.dispatch`."""
        meanwhile()
        grid, local = self.grid, self.grid.num_local
        everybody = all_gather(tokens, grid.both)
        weights = all_gather(routing.weights, grid.both)
        experts = launch_all_gather(routing.experts, grid.both).wait() - grid.first
        experts = torch.where((experts >= 0) & (experts < local), experts, local)
        splits: list[int] = p.tokens_per_expert(experts, local).tolist()
        order = p.expert_order(experts)[: sum(splits)]

        def combine(rows: Tensor) -> Tensor:
            return reduce_scatter(p.unpermute(rows, order, weights), grid.both).to(tokens.dtype)

        return Dispatched(p.permute(everybody, order, routing.topk), splits, combine)


def gather_uneven(rows: Tensor, group: ProcessGroup | None, lengths: list[int]) -> Tensor:
    """Concatenate the ranks' rows, `lengths` of them, for work that differs by rank (gradients are summed)."""
    if group is None:
        return rows
    size = group.size()
    copies = rows.repeat(size, 1)
    return all_to_all(copies, group, lengths, [rows.shape[0]] * size)


def reduce_scatter_uneven(rows: Tensor, group: ProcessGroup | None, lengths: list[int], rank: int) -> Tensor:
    """This rank's piece, `lengths[rank]` rows, of the sum of `rows` over the group."""
    if group is None:
        return rows
    size, own = group.size(), lengths[rank]
    pieces = all_to_all(rows, group, [own] * size, lengths)
    wide = torch.promote_types(rows.dtype, torch.float32)
    return pieces.view(size, own, rows.shape[1]).sum(0, dtype=wide).to(rows.dtype)
