"""TE's DotProductAttention with the argument order of our protocol, and its context parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

CP_COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")


@dataclass(frozen=True)
class ContextParallel:
    """Ranks that share a sequence, and how they talk.

    group: for "a2a+p2p" two (all-to-all inside, ring outside).
    stream: CUDA stream of the ring's communication, one for all layers.
    """

    group: ProcessGroup | tuple[ProcessGroup, ProcessGroup]
    comm_type: str
    stream: Any

    def __post_init__(self) -> None:
        if self.comm_type not in CP_COMM_TYPES:
            raise ValueError(f"--cp-comm-type {self.comm_type!r}: choose from {', '.join(CP_COMM_TYPES)}")
        if self.comm_type == "a2a+p2p" and not isinstance(self.group, tuple):
            raise ValueError("--cp-comm-type a2a+p2p: needs two groups of ranks; use p2p, all_gather or a2a")

    def ranks(self) -> list[int]:
        """Global ranks of all that share the sequence, by position."""
        if not isinstance(self.group, tuple):
            return dist.get_process_group_ranks(self.group)
        inner, outer = (dist.get_process_group_ranks(group) for group in self.group)
        # Every block of neighbours looks like this rank's, moved by as much as its member of the ring.
        return [peer + neighbour - dist.get_rank() for peer in outer for neighbour in inner]

    def groups(self) -> ProcessGroup | list[ProcessGroup]:
        """As TE takes them."""
        return list(self.group) if isinstance(self.group, tuple) else self.group


class EngineAttention(nn.Module):
    """Backend.DotProductAttention by TE; `core` is TE's module."""

    def __init__(self, core: nn.Module, context_parallel: ContextParallel | None = None) -> None:
        super().__init__()
        self.core = core
        self.set_context_parallel_group(context_parallel)

    def set_context_parallel_group(self, context_parallel: ContextParallel | None) -> None:
        """Share sequences over other ranks from now on; None: over none."""
        core: Any = self.core
        if context_parallel is None:
            if core.cp_group is not None:
                core.set_context_parallel_group(None, None, None)
            return
        core.set_context_parallel_group(
            context_parallel.groups(),
            context_parallel.ranks(),
            context_parallel.stream,
            context_parallel.comm_type,
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: str | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        document_ids: Any = None,
    ) -> Tensor:
        """See Backend.DotProductAttention. Raises ValueError for documents under context parallelism."""
        if document_ids is not None:
            raise ValueError(
                "--reset-attention-mask with --context-parallel-size > 1: Transformer Engine cannot keep attention "
                "inside documents; use --attention-backend local"
            )
        core: Any = self.core
        mask_type = attn_mask_type or core.attn_mask_type
        packed = (qkv_format or core.qkv_format) == "thd"
        if packed and not mask_type.startswith("padding"):
            # TE calls the borders between packed documents padding, also where nothing is padded.
            mask_type = "padding_causal" if mask_type == "causal" else "padding"
        options: dict[str, Any] = {}
        if packed:
            options["max_seqlen_q"] = _longest(cu_seqlens_q)
            options["max_seqlen_kv"] = _longest(cu_seqlens_kv)
        return core(
            query,
            key,
            value,
            attention_mask=attention_mask,
            attn_mask_type=mask_type,
            qkv_format=qkv_format,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_kv,
            **options,
        )


def _longest(cu_seqlens: Tensor | None) -> int | None:
    if cu_seqlens is None:
        return None
    return int((cu_seqlens[1:] - cu_seqlens[:-1]).max())


def communication_stream() -> Any:
    """A CUDA stream for context-parallel rings."""
    return torch.cuda.Stream()
