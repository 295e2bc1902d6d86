"""From a router's logits to the chosen experts and their weights. Pure functions of [tokens, experts] tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.models.moe.config import MoEConfig

_SINKHORN_ROUNDS = 1000


def choose_experts(logits: Tensor, config: MoEConfig, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The experts of each token, [tokens, k] int64, and their weights, [tokens, k].

    logits: [tokens, experts], fp32 or wider. bias: [experts], moves the choice and not the weights.
    """
    if config.score_function == "softmax":
        if config.pre_softmax:
            scores = logits.softmax(-1)
            experts = best_experts(scores, config)
            weights = scores.gather(1, experts)
        else:
            experts = best_experts(logits, config)
            weights = logits.gather(1, experts).softmax(-1)
    else:
        scores = independent_scores(logits, config)
        experts = best_experts(scores if bias is None else scores + bias, config)
        weights = scores.gather(1, experts)
        if config.topk > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    if config.topk_scaling_factor:
        weights = weights * config.topk_scaling_factor
    return experts, weights


def independent_scores(logits: Tensor, config: MoEConfig) -> Tensor:
    """Each expert's score on its own, any shape: the sigmoid of its logit, or the root of its softplus."""
    return logits.sigmoid() if config.score_function == "sigmoid" else F.softplus(logits).sqrt()


@torch.no_grad()
def best_experts(scores: Tensor, config: MoEConfig) -> Tensor:
    """The k best experts of each token, within its best groups where there are groups: [tokens, k].

    A group's score is the sum of its best topk / group_topk experts (DeepSeek-V3, https://arxiv.org/abs/2412.19437,
    section 2.1.2).
    """
    if config.num_groups is None or config.group_topk is None:
        return scores.topk(config.topk, dim=-1).indices
    grouped = scores.unflatten(-1, (config.num_groups, -1))
    group_scores = grouped.topk(config.topk // config.group_topk, dim=-1).values.sum(-1)
    groups = group_scores.topk(config.group_topk, dim=-1).indices
    outside = torch.ones_like(group_scores, dtype=torch.bool).scatter(1, groups, False)
    return (
        grouped.masked_fill(outside.unsqueeze(-1), float("-inf")).flatten(1).topk(config.topk, dim=-1).indices
    )


def balancing_scores(logits: Tensor, config: MoEConfig) -> tuple[Tensor, Tensor]:
    """What balancing losses look at: probabilities over all experts [tokens, experts], and the k experts [tokens, k]
    that they alone would choose, without groups and bias (as in Megatron and DeepSeek-V3).
    """
    if config.score_function == "softmax":
        scores = logits.softmax(-1)
    else:
        scores = independent_scores(logits, config)
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    return scores, scores.detach().topk(config.topk, dim=-1).indices


def choose_by_sinkhorn(logits: Tensor, config: MoEConfig, training: bool) -> tuple[Tensor, Tensor]:
    """Experts by an assignment that is balanced over these tokens (training), and their weights.

    BASE layers (https://arxiv.org/abs/2103.16716) as Megatron has them: the weights are not normalised.
    """
    scores = logits.sigmoid() if config.topk == 1 else logits.softmax(-1)
    with torch.no_grad():
        choice = sinkhorn(logits) if training else scores
        experts = choice.topk(config.topk, dim=-1).indices
    return experts, scores.gather(1, experts)


@torch.no_grad()
def sinkhorn(logits: Tensor, tolerance: float = 1e-4) -> Tensor:
    """exp(logits) scaled until rows and columns each have equal sums: [tokens, experts]."""
    cost = logits.exp()
    if not cost.shape[0]:
        return cost
    rows, columns = cost.new_ones(cost.shape[0]), cost.new_ones(cost.shape[1])
    for _ in range(_SINKHORN_ROUNDS):
        rows = 1.0 / (rows.shape[0] * ((columns * cost).sum(1) + 1e-8))
        before, columns = columns, 1.0 / (columns.shape[0] * ((rows.unsqueeze(1) * cost).sum(0) + 1e-8))
        if not (before - columns).abs().mean() > tolerance:
            break
    return columns * cost * rows.unsqueeze(1)
