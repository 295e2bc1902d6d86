"""Merging attention over parts of the keys by log-sum-exp. PURE tensor arithmetic: no torch.distributed.

Note [Merging]
Attention over a set of keys is out = sum(exp(s_i) v_i) / sum(exp(s_i)), lse = log(sum(exp(s_i))). Over the
union of two sets, lse = logaddexp(lse_a, lse_b) and out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b
(online softmax, Milakov and Gimelshein 2018, arXiv 1805.02867; FlashAttention, arXiv 2205.14135). Rows that
see no key have lse = -inf and out = 0, and are neutral. Weights are at most 1, so nothing overflows.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of attention over the union of two disjoint sets of keys.

    Args:
        out_a: [..., rows, head_dim], normalised over set a.
        lse_a: [..., rows], -inf for a row that sees no key of set a.
        out_b: as out_a, over set b.
        lse_b: as lse_a, over set b.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    # A row without any key has lse -inf; -inf - -inf is nan, so its weights are taken against 0: exp(-inf) =
    # 0.
    base = lse.masked_fill(lse == float("-inf"), 0.0)
    weight_a = (lse_a - base).exp().unsqueeze(-1)
    weight_b = (lse_b - base).exp().unsqueeze(-1)
    return weight_a * out_a + weight_b * out_b, lse


def merge_into(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """As `merge`, writing over `out` and `lse` (views will do). `other_out` is consumed as scratch."""
    total = torch.logaddexp(lse, other_lse)
    base = total.masked_fill(total == float("-inf"), 0.0)
    out.mul_((lse - base).exp().unsqueeze(-1))
    out.add_(other_out.mul_((other_lse - base).exp().unsqueeze(-1)))
    lse.copy_(total)
