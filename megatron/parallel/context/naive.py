"""Attention written out over whole sequences: the oracle of this package, and the path for any mask."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.parallel.context.local import accumulation_dtype


def naive_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    causal: bool,
    mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Return attention of whole sequences by plain differentiable torch calls.

    Args:
        q: [s, b, h, d].
        k: [s_k, b, groups, d]; head i of q reads group i // (h / groups).
        v: [s_k, b, groups, v_dim].
        softmax_scale: factor of the scores.
        causal: hide later positions.
        mask: bool, broadcast to [b, h, s, s_k], True where a query must NOT see a key (Megatron's
            attention_mask). Rows
            that see nothing give zeros.
        dropout: share of probabilities set to zero, drawn from the device's current random stream.

    Returns:
        [s, b, h, v_dim] in q's dtype, accumulated in float32 (float64 for float64).
    """
    dtype, share = accumulation_dtype(q.dtype), q.size(2) // k.size(2)
    keys, values = (x.to(dtype).repeat_interleave(share, dim=2) for x in (k, v))
    scores = torch.einsum("qbhd,kbhd->bhqk", q.to(dtype) * softmax_scale, keys)
    hidden = torch.zeros(scores.shape[-2:], dtype=torch.bool, device=q.device)
    if causal:
        hidden = torch.ones_like(hidden).triu(1 + k.size(0) - q.size(0))
    if mask is not None:
        hidden = hidden | mask
    # A large finite number instead of -inf, then zeros: rows that see nothing have neither nan nor gradient.
    scores = scores.masked_fill(hidden, torch.finfo(dtype).min / 2)
    probabilities = scores.softmax(dim=-1).masked_fill(hidden, 0.0)
    if dropout > 0.0:
        probabilities = F.dropout(probabilities, dropout)
    return torch.einsum("bhqk,kbhd->qbhd", probabilities, values).to(q.dtype)


def document_mask(document_ids: Tensor) -> Tensor:
    """Return the bool mask [b, 1, s, s], True between positions of different documents; ids are [b, s]."""
    return (document_ids.unsqueeze(2) != document_ids.unsqueeze(1)).unsqueeze(1)
