"""DeepEP (https://github.com/deepseek-ai/DeepEP) behind the flex dispatcher's protocol; its only importer.

Written to its documented interface (high-throughput kernels: get_dispatch_layout, dispatch, combine); it needs NVLink
or RDMA between GPUs and has not been run by this project's tests, which have neither.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron.parallel.expert.dispatch import ExpertGrid

_BYTES_PER_ELEMENT = 2
_HIDDEN_BYTES = 16384 * _BYTES_PER_ELEMENT
"""Buffers are sized for the widest hidden states that a model here has."""


class DeepEPBuffer:
    """A `FlexBuffer` (megatron/parallel/expert/flex.py) of one ep group; ValueError where DeepEP is not installed."""

    def __init__(self, grid: ExpertGrid) -> None:
        try:
            from deep_ep import Buffer  # type: ignore[import-not-found]
        except ImportError as error:
            raise ValueError(
                "--moe-token-dispatcher-type flex needs the package deep_ep; install it (it needs NVLink or RDMA), "
                "or use --moe-token-dispatcher-type alltoall"
            ) from error
        if grid.ep is None:
            raise ValueError(
                "--moe-token-dispatcher-type flex needs --expert-model-parallel-size 2 or more: raise it, or use "
                "--moe-token-dispatcher-type alltoall"
            )
        sizes = [Buffer.get_dispatch_config(grid.ep_size), Buffer.get_combine_config(grid.ep_size)]
        nvlink = max(size.get_nvl_buffer_size_hint(_HIDDEN_BYTES, grid.ep_size) for size in sizes)
        rdma = max(size.get_rdma_buffer_size_hint(_HIDDEN_BYTES, grid.ep_size) for size in sizes)
        self._num_experts = grid.num_experts
        self._buffer = Buffer(grid.ep, nvlink, rdma)

    def dispatch(
        self, tokens: Tensor, experts: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        """See `FlexBuffer.dispatch`."""
        per_rank, per_rdma_rank, per_expert, is_token_in_rank, _ = self._buffer.get_dispatch_layout(
            experts, self._num_experts
        )
        received, local, received_weights, _, handle, _ = self._buffer.dispatch(
            tokens,
            topk_idx=experts,
            topk_weights=weights.float(),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=is_token_in_rank,
            num_tokens_per_expert=per_expert,
        )
        return received, local, received_weights, handle

    def dispatch_again(self, tokens: Tensor, handle: Any) -> Tensor:
        """See `FlexBuffer.dispatch_again`."""
        received: Tensor = self._buffer.dispatch(tokens, handle=handle)[0]
        return received

    def combine(self, rows: Tensor, weights: Tensor | None, handle: Any) -> tuple[Tensor, Tensor | None]:
        """See `FlexBuffer.combine`."""
        out, out_weights, _ = self._buffer.combine(rows, handle, topk_weights=weights)
        return out, out_weights
