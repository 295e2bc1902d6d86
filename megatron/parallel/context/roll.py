"""Shift a sequence that is split over context-parallel ranks, as multi-token prediction shifts labels."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.parallel.flight import Recorded


def roll_left(tensor: Tensor, dim: int, group: dist.ProcessGroup | None, fill: float = 0) -> Tensor:
    """Return the part of this rank of the whole sequence moved one position to the left. Not differentiable.

    Position i gets the value of position i + 1, also where that is another rank's; the last position gets
    `fill`.

    Args:
        tensor: tokens, labels, loss mask or position ids, the zigzag part of this rank along `dim`.
        dim: the sequence dim.
        group: context-parallel group, None for one rank.
        fill: the value after the end.
    """
    rolled = tensor.roll(-1, dims=dim)
    cp = 1 if group is None else dist.get_world_size(group)
    if cp == 1:
        rolled.select(dim, -1).fill_(fill)
        return rolled
    rank, half = dist.get_rank(group), tensor.size(dim) // 2
    # The first value of both chunks of every rank: what follows the last of some other chunk.
    heads = torch.stack([tensor.select(dim, 0), tensor.select(dim, half)]).contiguous()
    gathered = heads.new_empty(cp, *heads.shape)
    with Recorded("all_gather", group, (heads,), "rolled labels"):
        dist.all_gather_into_tensor(gathered.view(-1), heads.view(-1), group=group)
    early_next = gathered[rank + 1, 0] if rank + 1 < cp else gathered[rank, 1]
    rolled.select(dim, half - 1).copy_(early_next)
    if rank == 0:
        rolled.select(dim, -1).fill_(fill)
    else:
        rolled.select(dim, -1).copy_(gathered[rank - 1, 1])
    return rolled
