"""Rows of tokens sorted by expert, and back; expert capacity. PURE: nothing here knows of ranks.

Note "Entries". Token t has an entry for each of its k choices; entry t * k + j goes to expert `experts[t, j]`. An
entry that was dropped has the expert number `num_experts` and the weight 0, so shapes never depend on data; it is
sorted to the end and cut off there, or lies in a last slot that nobody computes.

Note "Order of sums". A token's outputs are brought back to entry order and summed over its k entries, and so are
the gradients of its copies: the same order whatever the dispatcher, the ranks and the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DROP_POLICIES = ("probs", "position")


@dataclass(frozen=True)
class Routing:
    """Which experts each token goes to (note "Entries").

    Attributes:
        experts: [tokens, k] int64, all different in a row unless dropped.
        weights: [tokens, k], of the experts' outputs; differentiable, in the router's precision.
        num_experts: of the whole layer.
        capacity: each expert gets exactly so many rows of each rank, the missing ones zero; None: as many as came.
    """

    experts: Tensor
    weights: Tensor
    num_experts: int
    capacity: int | None = None

    @property
    def topk(self) -> int:
        """Entries of a token."""
        return self.experts.shape[1]


def tokens_per_expert(experts: Tensor, num_experts: int) -> Tensor:
    """Number of entries of each expert, [num_experts] int64; dropped ones do not count. No host wait."""
    flat = experts.reshape(-1)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=experts.device)
    return counts.index_add_(0, flat, torch.ones_like(flat))[:num_experts]


def expert_order(experts: Tensor) -> Tensor:
    """Entries sorted by expert, in the order of tokens within one, dropped ones last: [tokens * k] int64."""
    return experts.reshape(-1).argsort(stable=True)


def position_in_expert(experts: Tensor, priority: Tensor | None = None) -> Tensor:
    """How many entries of the same expert come before each entry, [tokens, k].

    priority: [tokens, k]; an expert's entries are ordered by it, highest first, then by token. None: by token.
    """
    flat = experts.reshape(-1)
    if priority is None:
        order = flat.argsort(stable=True)
    else:
        order = priority.reshape(-1).argsort(descending=True, stable=True)
        order = order[flat[order].argsort(stable=True)]
    sorted_experts = flat[order]
    first = torch.searchsorted(sorted_experts, sorted_experts)  # where the expert's run begins
    positions = torch.empty_like(flat)
    positions[order] = torch.arange(flat.numel(), device=flat.device) - first
    return positions.view_as(experts)


def expert_capacity(num_tokens: int, topk: int, num_experts: int, factor: float) -> int:
    """Entries that an expert takes of one rank's tokens: its even share times `factor`, rounded up."""
    share = num_tokens * topk / num_experts * factor
    return int(share) + (share > int(share))


def apply_capacity(routing: Routing, capacity: int, policy: str, pad: bool) -> Routing:
    """Drop what exceeds each expert's capacity.

    policy: "probs" keeps the entries with the largest weights, "position" the first. pad: ask for exactly
    `capacity` rows an expert.
    """
    assert policy in DROP_POLICIES, policy
    priority = routing.weights.detach() if policy == "probs" else None
    kept = position_in_expert(routing.experts, priority) < capacity
    experts = torch.where(kept, routing.experts, routing.num_experts)
    weights = torch.where(kept, routing.weights, 0.0)
    return Routing(experts, weights, routing.num_experts, capacity if pad else None)


def permute(tokens: Tensor, order: Tensor, topk: int) -> Tensor:
    """Rows of the entries in `order`: tokens [t, h], order [n] -> [n, h]. Gradients by note "Order of sums"."""
    return _Permute.apply(tokens, order, topk)


def unpermute(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of each token's rows.

    rows: [n, h] of the entries `order` [n]; entries that are not there count as zero. weights: [t, k]. Returns
    [t, h] in the wider of the two dtypes.
    """
    num_tokens, topk = weights.shape
    entries = rows.new_zeros(num_tokens * topk, rows.shape[1]).index_copy(0, order, rows)
    return (entries.view(num_tokens, topk, rows.shape[1]) * weights.unsqueeze(-1)).sum(1)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, topk: int) -> Tensor:
        ctx.order, ctx.topk, ctx.num_tokens = order, topk, tokens.shape[0]
        return tokens.index_select(0, order.div(topk, rounding_mode="floor"))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        entries = grad.new_zeros(ctx.num_tokens * ctx.topk, grad.shape[1])
        entries.index_copy_(0, ctx.order, grad)
        wide = torch.promote_types(grad.dtype, torch.float32)
        return (
            entries.view(ctx.num_tokens, ctx.topk, grad.shape[1]).sum(1, dtype=wide).to(grad.dtype),
            None,
            None,
        )


def slots(routing: Routing) -> Tensor:
    """The row of each entry where every expert has `capacity` rows; dropped entries share the row after the last.

    Returns [tokens * k] int64.
    """
    assert routing.capacity is not None
    slot = routing.experts * routing.capacity + position_in_expert(routing.experts)
    last = routing.num_experts * routing.capacity
    return slot.clamp(max=last).reshape(-1)


def permute_padded(tokens: Tensor, slot: Tensor, topk: int, num_rows: int) -> Tensor:
    """Rows by `slots`: tokens [t, h] -> [num_rows, h], zero where no entry came."""
    entries = permute(tokens, torch.arange(slot.numel(), device=slot.device), topk)
    return entries.new_zeros(num_rows + 1, tokens.shape[1]).index_copy(0, slot, entries)[:num_rows]


def unpermute_padded(rows: Tensor, slot: Tensor, weights: Tensor) -> Tensor:
    """As `unpermute`, of rows by `slots`."""
    with_dropped = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
    order = torch.arange(slot.numel(), device=slot.device)
    return unpermute(with_dropped.index_select(0, slot), order, weights)


def padded_places(splits: list[int], multiple: int) -> tuple[list[int], Tensor]:
    """Each expert's rows rounded up to a multiple, and where its real rows then lie: (splits, [n] int64, ascending)."""
    padded = [-(-split // multiple) * multiple for split in splits]
    starts = [sum(padded[:index]) for index in range(len(padded))]
    places = [torch.arange(start, start + split) for start, split in zip(starts, splits, strict=True)]
    return padded, torch.cat(places)


def sort_chunks(rows: Tensor, sizes: list[int], order: list[int]) -> Tensor:
    """Rows as chunks of `sizes` one after the other -> the same chunks in `order`."""
    chunks = rows.split(sizes)
    return torch.cat([chunks[index] for index in order])


def inverse_order(order: list[int]) -> list[int]:
    """The order that undoes `order`."""
    inverse = [0] * len(order)
    for position, index in enumerate(order):
        inverse[index] = position
    return inverse


def naive_experts(tokens: Tensor, routing: Routing, apply: Any) -> Tensor:
    """The oracle of every dispatcher: one entry after the other. apply(expert, rows [1, h]) -> [1, h]."""
    out = []
    for t in range(tokens.shape[0]):
        total = torch.zeros_like(tokens[t])
        for j in range(routing.topk):
            expert = int(routing.experts[t, j])
            if expert < routing.num_experts:
                total = total + routing.weights[t, j] * apply(expert, tokens[t : t + 1])[0]
        out.append(total)
    return torch.stack(out) if out else tokens
