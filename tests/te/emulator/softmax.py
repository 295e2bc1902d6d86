"""The scaled (and masked) softmaxes of TE's unfused attention; TE passes [batch, heads, queries, keys] or
flatter.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MASKED_SCORE = -10000.0
"""What TE's kernel adds to a masked score; a row with nothing unmasked gives zeros."""


def scaled_softmax_forward(x: Tensor, scale: float) -> Tensor:
    """softmax(scale x)."""
    return torch.softmax(x.float() * scale, -1).to(x.dtype)


def scaled_masked_softmax_forward(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    """softmax(scale x) where mask is False."""
    scores = (x.float() * scale).masked_fill(mask.bool(), MASKED_SCORE)
    return torch.softmax(scores, -1).masked_fill(mask.bool().all(-1, True), 0.0).to(x.dtype)


def _causal(x: Tensor, scale: float, offset: int) -> Tensor:
    queries, keys = x.shape[-2:]
    future = torch.ones(queries, keys, dtype=torch.bool).triu(1 + offset)
    return torch.softmax((x.float() * scale).masked_fill(future, -math.inf), -1).to(x.dtype)


def scaled_upper_triang_masked_softmax_forward(x: Tensor, scale: float) -> Tensor:
    """Causal, query i sees keys up to i."""
    return _causal(x, scale, 0)


def scaled_aligned_causal_masked_softmax_forward(x: Tensor, scale: float) -> Tensor:
    """Causal, the last query sees the last key."""
    return _causal(x, scale, x.shape[-1] - x.shape[-2])


def softmax_backward(output_gradient: Tensor, softmax: Tensor, scale: float) -> Tensor:
    """The same for all four: masked probabilities are zero."""
    gradient, p = output_gradient.float(), softmax.float()
    return (p * (gradient - (gradient * p).sum(-1, True)) * scale).to(output_gradient.dtype)


FUNCTIONS = (
    scaled_softmax_forward,
    scaled_masked_softmax_forward,
    scaled_upper_triang_masked_softmax_forward,
    scaled_aligned_causal_masked_softmax_forward,
)
BACKWARD_NAMES = tuple(function.__name__.replace("_forward", "_backward") for function in FUNCTIONS)
