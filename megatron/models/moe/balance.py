"""Losses that keep experts evenly loaded and logits small, and the bias that does it without a loss.

Note "Token sets". With T tokens, k choices, E experts, f_e the fraction of choices that went to expert e and P_e its
mean probability, a balancing loss is E sum_e f_e P_e (Switch Transformer, https://arxiv.org/abs/2101.03961). Its
tokens are: aux_loss and z-loss: one microbatch of one data-parallel rank, over tensor and context ranks;
seq_aux_loss: one sequence, then the mean over the sequences; global_aux_loss (https://arxiv.org/abs/2501.11873):
f of all tokens of the step so far on all data-parallel ranks, P of the microbatch. Counts are summed over the ranks;
P of each rank's own tokens is divided by all of them, so the ranks' values, and gradients, are parts of a sum.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.parallel.collectives import launch_all_reduce
from megatron.parallel.expert.permute import tokens_per_expert


def load_balancing_loss(
    probabilities: Tensor, counts: Tensor, num_counted: Tensor | int, num_tokens: int, topk: int
) -> Tensor:
    """This rank's part of E sum_e f_e P_e, a scalar.

    Args:
        probabilities: [tokens of this rank, experts].
        counts: [experts] choices of each expert among `num_counted` tokens.
        num_tokens: of the microbatch, on all its ranks.
    """
    num_experts = probabilities.shape[1]
    fractions = counts.to(probabilities.dtype) / (num_counted * topk)
    return (probabilities.sum(0) * fractions).sum() * (num_experts / num_tokens)


def sequence_load_balancing_loss(probabilities: Tensor, counts: Tensor, length: int, topk: int) -> Tensor:
    """This rank's part of the mean over sequences of each one's loss.

    probabilities: [s of this rank, sequences, experts]. counts: [sequences, experts]. length: of a whole sequence.
    """
    batch, num_experts = counts.shape
    fractions = counts.to(probabilities.dtype) / (length * topk)
    return (probabilities.sum(0) * fractions).sum() * (num_experts / (length * batch))


def z_loss(logits: Tensor, num_tokens: int) -> Tensor:
    """This rank's part of the mean of logsumexp(logits)^2 (ST-MoE, https://arxiv.org/abs/2202.08906)."""
    return logits.logsumexp(-1).square().sum() / num_tokens


def summed_counts(experts: Tensor, num_experts: int, group: ProcessGroup | None) -> Tensor:
    """Choices of each expert over the ranks of `group`, [experts] int64. experts: [tokens, k]."""
    return launch_all_reduce(tokens_per_expert(experts, num_experts), group).wait()


def summed_counts_by_sequence(
    experts: Tensor, batch: int, num_experts: int, group: ProcessGroup | None
) -> Tensor:
    """The same for each sequence, [batch, experts]. experts: [s * batch, k], sequences fastest."""
    own = torch.arange(experts.shape[0], device=experts.device) % batch
    joint = own.unsqueeze(1) * num_experts + experts
    counts = tokens_per_expert(joint, batch * num_experts)
    return launch_all_reduce(counts, group).wait().view(batch, num_experts)


def moved_bias(bias: Tensor, counts: Tensor, rate: float) -> Tensor:
    """The expert bias after a step: up by `rate` where an expert got less than the mean, down where more.

    bias: [experts] fp32. counts: [experts], of the whole step over all ranks (https://arxiv.org/abs/2408.15664).
    """
    below_mean = torch.sign(counts.sum() - counts * counts.numel())  # in integers: exact
    return bias + below_mean.to(bias.dtype) * rate
