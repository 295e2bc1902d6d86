"""Zigzag split of a sequence over context-parallel ranks. PURE: no torch.distributed.

Note [Zigzag]
The sequence is cut into 2 * cp chunks of equal length; rank r holds chunk r and chunk 2 * cp - 1 - r, in this
order. Under a causal mask the rows of an early chunk see few keys and those of its mirror chunk many, so
every rank has the same work, in every step of a ring (Striped and zigzag ring attention, Brandon et al. 2023,
arXiv 2311.09431; Llama 3 herd of models, section 3.3.2). Local order is increasing global order, so a causal
mask over a rank's own rows is a plain causal mask. One rank (cp 1) holds the sequence as it is, of any
length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Range: TypeAlias = tuple[int, int]

# Entries of a batch that are split along dim 1, the sequence; the names are those of Megatron's get_batch.
_SEQUENCE_ENTRIES = ("tokens", "labels", "loss_mask", "position_ids")


def check_sequence_length(seq_length: int, cp: int) -> None:
    """Raise ValueError unless `seq_length` tokens can be cut in 2 * cp equal chunks; at cp 1 any can."""
    if cp < 1:
        raise ValueError(f"--context-parallel-size is {cp}: give a size of 1 or more")
    if cp > 1 and (seq_length < 2 * cp or seq_length % (2 * cp) != 0):
        above = max(1, -(-seq_length // (2 * cp))) * 2 * cp
        raise ValueError(
            f"--seq-length {seq_length} does not divide by 2 * --context-parallel-size ({cp}) = {2 * cp}, "
            f"which the zigzag split needs: use --seq-length {above} or another --context-parallel-size"
        )


def zigzag_ranges(seq_length: int, cp: int, rank: int) -> tuple[Range, ...]:
    """Return the global (start, stop) ranges of rank `rank`, in local order.

    Raises:
        ValueError: the length does not divide by 2 * cp.
    """
    check_sequence_length(seq_length, cp)
    assert 0 <= rank < cp, f"rank {rank} of {cp}"
    if cp == 1:
        return ((0, seq_length),)
    chunk = seq_length // (2 * cp)
    mirror = 2 * cp - 1 - rank
    return (rank * chunk, (rank + 1) * chunk), (mirror * chunk, (mirror + 1) * chunk)


def zigzag_indices(seq_length: int, cp: int, rank: int, device: torch.device | str | None = None) -> Tensor:
    """Return the global positions of a rank's rows, int64 [seq_length / cp]: also its RoPE positions."""
    ranges = zigzag_ranges(seq_length, cp, rank)
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in ranges])


def split(tensor: Tensor, dim: int, cp: int, rank: int) -> Tensor:
    """Return a rank's part of a whole tensor, contiguous (the tensor itself at cp 1). Differentiable.

    Args:
        tensor: any shape, the whole sequence along `dim`.
        dim: the sequence dim.
        cp: number of context-parallel ranks.
        rank: which of them.

    Raises:
        ValueError: the length along `dim` does not divide by 2 * cp.
    """
    ranges = zigzag_ranges(tensor.size(dim), cp, rank)
    if cp == 1:
        return tensor
    return torch.cat([tensor.narrow(dim, start, stop - start) for start, stop in ranges], dim=dim)


def unsplit(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Join the parts of all ranks, by rank, to the whole sequence along `dim`: the inverse of `split`."""
    if len(parts) == 1:
        return parts[0]
    length = parts[0].size(dim)
    assert length % 2 == 0 and all(part.size(dim) == length for part in parts), (
        "parts of a zigzag split are even and equal"
    )
    early = [part.narrow(dim, 0, length // 2) for part in parts]
    late = [part.narrow(dim, length // 2, length // 2) for part in reversed(parts)]
    return torch.cat(early + late, dim=dim)


def split_batch(batch: Mapping[str, object], cp: int, rank: int) -> dict[str, object]:
    """Return a rank's part of a batch that every context-parallel rank has read whole.

    tokens, labels, loss_mask and position_ids ([b, s]) are split along the sequence; a dense attention_mask
    ([b, 1, s, s]) along its query rows. Everything else, document boundaries above all, stays whole:
    attention needs the documents of the keys that other ranks hold (see documents.Documents). Entries that
    are None stay None.

    Raises:
        ValueError: the sequence length does not divide by 2 * cp.
    """
    local: dict[str, object] = {}
    for name, value in batch.items():
        if not isinstance(value, Tensor):
            local[name] = value
        elif name in _SEQUENCE_ENTRIES:
            local[name] = split(value, 1, cp, rank)
        elif name == "attention_mask":
            local[name] = split(value, 2, cp, rank)
        else:
            local[name] = value
    return local
