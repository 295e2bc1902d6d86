"""The package deep_ep over gloo: the calls of DeepEP and HybridEP that we use, with plain all-to-alls."""

from __future__ import annotations

import contextlib
import importlib.machinery
import sys
import types
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.parallel.collectives import launch_all_gather, launch_all_to_all
from megatron.parallel.expert import ExpertGrid
from megatron.parallel.expert.flex import flex_buffer


@contextlib.contextmanager
def deep_ep_over_gloo() -> Iterator[None]:
    """Within it, deep_ep is installed: the libraries below."""
    module = types.ModuleType("deep_ep")
    module.__spec__ = importlib.machinery.ModuleSpec("deep_ep", None)
    module.Buffer, module.HybridEPBuffer = Buffer, HybridEPBuffer
    # Not mock.patch.dict: it would also forget what else is imported meanwhile.
    sys.modules["deep_ep"] = module
    try:
        yield
    finally:
        del sys.modules["deep_ep"]


def fake_flex_buffer(backend: str, grid: ExpertGrid):
    """flex_buffer() with the libraries below."""
    with deep_ep_over_gloo():
        return flex_buffer(backend, grid)


class Buffer:
    """DeepEP."""

    class Config:
        def get_nvl_buffer_size_hint(self, hidden_bytes: int, size: int) -> int:
            return hidden_bytes * size

        get_rdma_buffer_size_hint = get_nvl_buffer_size_hint

    @classmethod
    def get_dispatch_config(cls, size: int) -> Config:
        return cls.Config()

    get_combine_config = get_dispatch_config

    def __init__(self, group: dist.ProcessGroup, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        assert num_nvl_bytes and num_rdma_bytes
        self.group, self.over = group, None

    def get_dispatch_layout(self, experts: Tensor, num_experts: int):
        size = self.group.size()
        grid = ExpertGrid(num_experts, ep=self.group, ep_rank=self.group.rank(), ep_size=size)
        self.over = GlooFlexBuffer(grid)
        owner = experts // grid.num_local
        in_rank = torch.stack([(owner == rank).any(1) for rank in range(size)], 1)
        return in_rank.sum(0), None, torch.bincount(experts.flatten(), minlength=num_experts), in_rank, None

    def dispatch(self, tokens: Tensor, handle=None, *, topk_idx=None, topk_weights=None, **layout):
        if handle is not None:
            return self.over.dispatch_again(tokens, handle), None, None, None, handle, None
        assert layout["num_tokens_per_rank"].sum() == layout["is_token_in_rank"].sum()
        assert layout["num_tokens_per_expert"].sum() == topk_idx.numel()
        received, experts, weights, handle = self.over.dispatch(tokens, topk_idx, topk_weights)
        return received, experts, weights, None, handle, None

    def combine(self, rows: Tensor, handle, topk_weights=None):
        return (*self.over.combine(rows, topk_weights, handle), None)


class HybridEPBuffer:
    """HybridEP: rows come sorted by expert, once for each of a token's experts."""

    def __init__(self, group, hidden_dim, max_num_of_tokens_per_rank, num_local_experts, use_fp8=False):
        assert not use_fp8 and hidden_dim and max_num_of_tokens_per_rank
        self.group, self.num_local = group, num_local_experts

    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        scaling_factor: Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        handle=None,
        pad_multiple: int | None = None,
        num_permuted_tokens: int | None = None,
        non_blocking: bool = False,
    ):
        if handle is None:
            assert num_of_experts_per_rank == self.num_local
            handle = self._plan(routing_map)
        expert, token, _, order = handle[:4]
        rows = self._send(hidden[token], handle)[order]
        assert num_permuted_tokens in (None, rows.shape[0])
        weights = None if probs is None else self._send(probs[token, expert].unsqueeze(1), handle)[order]
        return rows, None if weights is None else weights.flatten(), None, handle[5], handle

    def combine_with_unpermute(self, *, hidden: Tensor, handle, probs=None, pad_multiple=None):
        expert, token, routing_map, order = handle[:4]
        rows = self._back(torch.empty_like(hidden).index_copy(0, order, hidden), handle)
        out = hidden.new_zeros(routing_map.shape[0], hidden.shape[1]).index_add_(0, token, rows)
        if probs is None:
            return out, None
        weights = self._back(torch.empty_like(probs).index_copy(0, order, probs).unsqueeze(1), handle)
        everywhere = probs.new_zeros(routing_map.shape)
        everywhere[token, expert] = weights.flatten()
        return out, everywhere

    def _plan(self, routing_map: Tensor):
        expert, token = routing_map.t().nonzero(as_tuple=True)  # by expert
        size, rank = self.group.size(), self.group.rank()
        counts = launch_all_gather(routing_map.sum(0), self.group).wait().view(size, size, self.num_local)
        sent, received = counts[rank].sum(1).tolist(), counts[:, rank].sum(1).tolist()
        local = torch.arange(self.num_local).repeat(size).repeat_interleave(counts[:, rank].flatten())
        order = local.argsort(stable=True)
        return expert, token, routing_map, order, (sent, received), counts[:, rank].sum(0)

    def _send(self, rows: Tensor, handle) -> Tensor:
        sent, received = handle[4]
        return launch_all_to_all(rows, self.group, received, sent).wait()

    def _back(self, rows: Tensor, handle) -> Tensor:
        sent, received = handle[4]
        return launch_all_to_all(rows, self.group, sent, received).wait()


class GlooFlexBuffer:
    """Sends a token once to every rank that has any of its experts."""

    def __init__(self, grid: ExpertGrid) -> None:
        self.grid = grid

    def dispatch(self, tokens: Tensor, experts: Tensor, weights: Tensor):
        grid = self.grid
        owner = experts // grid.num_local
        sent = [(owner == rank).any(1).nonzero().flatten() for rank in range(grid.ep_size)]
        counts = torch.tensor([item.numel() for item in sent])
        received = launch_all_to_all(counts, grid.ep, None, None).wait().tolist()
        handle = (torch.cat(sent), [item.numel() for item in sent], received, tokens.shape[0])
        local = self._send(experts, handle) - grid.first
        here = (local >= 0) & (local < grid.num_local)
        out_weights = self._send(weights, handle)
        return (
            self._send(tokens, handle),
            torch.where(here, local, -1),
            torch.where(here, out_weights, 0.0),
            (*handle, here),
        )

    def dispatch_again(self, tokens: Tensor, handle) -> Tensor:
        return self._send(tokens, handle)

    def combine(self, rows: Tensor, weights: Tensor | None, handle):
        if weights is not None:
            weights = torch.where(handle[4], weights, 0.0)
        return self._back(rows, handle), None if weights is None else self._back(weights, handle)

    def _send(self, values: Tensor, handle) -> Tensor:
        index, sent, received = handle[:3]
        return launch_all_to_all(values[index], self.grid.ep, received, sent).wait()

    def _back(self, values: Tensor, handle) -> Tensor:
        index, sent, received, count = handle[:4]
        rows = launch_all_to_all(values, self.grid.ep, sent, received).wait()
        return rows.new_zeros(count, rows.shape[1]).index_add_(0, index, rows)
