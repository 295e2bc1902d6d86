"""A FlexBuffer over gloo: what DeepEP does, with plain all-to-alls."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.parallel.collectives import launch_all_to_all
from megatron.parallel.expert import ExpertGrid


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
