"""Attention written out over whole sequences: the oracle of this package, and the path for any mask."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.parallel.context.local import accumulation_dtype


def naive_attention(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool, mask: Tensor | None = None
) -> Tensor:
    """Return attention of whole sequences by plain differentiable torch calls.

    Args:
        q: [s, b, h, d].
        k: [s_k, b, groups, d]; head i of q reads group i // (h / groups).
        v: [s_k, b, groups, v_dim].
        softmax_scale: factor of the scores.
        causal: hide later positions.
        mask: bool, broadcast to [b, h, s, s_k], True where a query must NOT see a key (Megatron's
            attention_mask). Rows that see nothing give zeros.

    Returns:
        [s, b, h, v_dim] in q's dtype, accumulated in float32 (float64 for float64).
    """
    probabilities = attention_probabilities(q, k, softmax_scale=softmax_scale, causal=causal, mask=mask)
    return average(probabilities, v)


def attention_probabilities(
    q: Tensor, k: Tensor, *, softmax_scale: float, causal: bool, mask: Tensor | None = None
) -> Tensor:
    """Return the probabilities [b, h, s, s_k] of `naive_attention`, in the accumulation dtype."""
    dtype = accumulation_dtype(q.dtype)
    keys = k.to(dtype).repeat_interleave(q.size(2) // k.size(2), dim=2)
    scores = torch.einsum("qbhd,kbhd->bhqk", q.to(dtype) * softmax_scale, keys)
    hidden = torch.zeros(scores.shape[-2:], dtype=torch.bool, device=q.device)
    if causal:
        hidden = torch.ones_like(hidden).triu(1 + k.size(0) - q.size(0))
    if mask is not None:
        hidden = hidden | mask
    # A large finite number instead of -inf, then zeros: rows that see nothing have neither nan nor gradient.
    scores = scores.masked_fill(hidden, torch.finfo(dtype).min / 2)
    return scores.softmax(dim=-1).masked_fill(hidden, 0.0)


def average(probabilities: Tensor, v: Tensor) -> Tensor:
    """Return the values [s_k, b, groups, v_dim] averaged by probabilities [b, h, s, s_k]: [s, b, h, v_dim]."""
    values = v.to(probabilities.dtype).repeat_interleave(probabilities.size(1) // v.size(2), dim=2)
    return torch.einsum("bhqk,kbhd->qbhd", probabilities, values).to(v.dtype)


def document_mask(document_ids: Tensor) -> Tensor:
    """Return the bool mask [b, 1, s, s], True between positions of different documents; ids are [b, s]."""
    return (document_ids.unsqueeze(2) != document_ids.unsqueeze(1)).unsqueeze(1)
