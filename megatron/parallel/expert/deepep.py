"""DeepEP (https://github.com/deepseek-ai/DeepEP) and its HybridEP behind the flex dispatcher's protocol; the only
importer of deep_ep.

Written to their documented interfaces (DeepEP's high-throughput kernels: get_dispatch_layout, dispatch, combine;
HybridEP's dispatch_with_permute and combine_with_unpermute). They need NVLink or RDMA between GPUs, which this
project's tests do not have: these put a fake deep_ep over gloo behind the same calls.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.parallel.expert.dispatch import ExpertGrid

_BYTES_PER_ELEMENT = 2
_HIDDEN_BYTES = 16384 * _BYTES_PER_ELEMENT
"""Buffers are sized for the widest hidden states that a model here has."""


class DeepEPBuffer:
    """A `FlexBuffer` (megatron/parallel/expert/flex.py) of one ep group; ValueError where DeepEP is not installed."""

    def __init__(self, grid: ExpertGrid) -> None:
        Buffer = _class_of_library("Buffer", "deepep")
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


class HybridEPBuffer:
    """A `FlexBuffer` of one ep group by HybridEP, which also sorts rows by expert: a token comes once for each of its
    experts here.
    """

    def __init__(self, grid: ExpertGrid) -> None:
        self._kind = _class_of_library("HybridEPBuffer", "hybridep")
        self._grid = grid
        self._buffer: Any = None  # made for the first tokens; the library grows it

    def dispatch(
        self, tokens: Tensor, experts: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        """See `FlexBuffer.dispatch`."""
        if self._buffer is None:
            self._buffer = self._kind(
                group=self._grid.ep,
                hidden_dim=tokens.shape[1],
                max_num_of_tokens_per_rank=tokens.shape[0],
                num_local_experts=self._grid.num_local,
                use_fp8=False,
            )
        everywhere = weights.new_zeros(tokens.shape[0], self._grid.num_experts, dtype=torch.float32)
        received, received_weights, _, counts, handle = self._buffer.dispatch_with_permute(
            hidden=tokens,
            routing_map=everywhere.bool().scatter(1, experts, True),
            probs=everywhere.scatter(1, experts, weights.float()),
            scaling_factor=None,
            num_of_experts_per_rank=self._grid.num_local,
            pad_multiple=None,
            num_permuted_tokens=None,
            non_blocking=False,
        )
        local = torch.arange(self._grid.num_local, device=tokens.device)
        own = local.repeat_interleave(counts.to(tokens.device, torch.int64), output_size=received.shape[0])
        return received, own.unsqueeze(1), received_weights.reshape(-1, 1), (handle, experts, counts)

    def dispatch_again(self, tokens: Tensor, handle: Any) -> Tensor:
        """See `FlexBuffer.dispatch_again`."""
        received: Tensor = self._buffer.dispatch_with_permute(
            hidden=tokens,
            scaling_factor=None,
            handle=handle[0],
            pad_multiple=None,
            num_permuted_tokens=int(handle[2].sum()),
        )[0]
        return received

    def combine(self, rows: Tensor, weights: Tensor | None, handle: Any) -> tuple[Tensor, Tensor | None]:
        """See `FlexBuffer.combine`."""
        state, experts, _ = handle
        flat = None if weights is None else weights.reshape(-1)
        out, everywhere = self._buffer.combine_with_unpermute(
            hidden=rows, probs=flat, handle=state, pad_multiple=None
        )
        return out, None if weights is None else everywhere.gather(1, experts)


BUFFERS: dict[str, Callable[[ExpertGrid], Any]] = {"deepep": DeepEPBuffer, "hybridep": HybridEPBuffer}
"""--moe-flex-dispatcher-backend -> what is built."""


def _class_of_library(name: str, backend: str) -> Any:
    try:
        return getattr(importlib.import_module("deep_ep"), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"--moe-flex-dispatcher-backend {backend} needs the package deep_ep with {name}; install it (it needs "
            "NVLink or RDMA), or use --moe-token-dispatcher-type alltoall"
        ) from error
