"""TorchBackend: the layers of this folder behind the Backend protocol. Runs wherever torch runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from megatron.models.backends.base import Backend
from megatron.models.backends.torch.attention import DotProductAttention
from megatron.models.backends.torch.delayed import DelayedWeightGradients
from megatron.models.backends.torch.embedding import VocabParallelEmbedding
from megatron.models.backends.torch.grouped import GroupedLinear
from megatron.models.backends.torch.linear import LayerNormLinear, Linear
from megatron.models.backends.torch.mlp import LayerNormMLP
from megatron.models.backends.torch.norm import LayerNorm, RMSNorm
from megatron.parallel.random import RngStreams, checkpoint


class TorchBackend(Backend):
    """Builds layers of plain torch. Arguments are described in the protocol (base.py)."""

    name = "torch"

    def Linear(self, in_features: int, out_features: int, **arguments: Any) -> nn.Module:
        """See Backend.Linear."""
        return Linear(in_features, out_features, options=self.options, **arguments)

    def LayerNormLinear(self, in_features: int, out_features: int, **arguments: Any) -> nn.Module:
        """See Backend.LayerNormLinear."""
        return LayerNormLinear(in_features, out_features, options=self.options, **arguments)

    def LayerNormMLP(self, hidden_size: int, ffn_hidden_size: int, **arguments: Any) -> nn.Module:
        """See Backend.LayerNormMLP."""
        arguments.setdefault("set_parallel_mode", True)
        return LayerNormMLP(hidden_size, ffn_hidden_size, options=self.options, **arguments)

    def GroupedLinear(
        self, num_gemms: int, in_features: int, out_features: int, **arguments: Any
    ) -> nn.Module:
        """See Backend.GroupedLinear."""
        return GroupedLinear(num_gemms, in_features, out_features, options=self.options, **arguments)

    def LayerNorm(self, hidden_size: int, **arguments: Any) -> nn.Module:
        """See Backend.LayerNorm."""
        return LayerNorm(hidden_size, options=self.options, **arguments)

    def RMSNorm(self, hidden_size: int, **arguments: Any) -> nn.Module:
        """See Backend.RMSNorm."""
        return RMSNorm(hidden_size, options=self.options, **arguments)

    def DotProductAttention(
        self, num_attention_heads: int, kv_channels: int | tuple[int, int], **arguments: Any
    ) -> nn.Module:
        """See Backend.DotProductAttention."""
        return DotProductAttention(num_attention_heads, kv_channels, options=self.options, **arguments)

    def VocabParallelEmbedding(self, num_embeddings: int, embedding_dim: int, **arguments: Any) -> nn.Module:
        """See Backend.VocabParallelEmbedding."""
        return VocabParallelEmbedding(num_embeddings, embedding_dim, options=self.options, **arguments)

    def autocast(self, recipe: str | None) -> AbstractContextManager[None]:
        """Nothing; ValueError for a recipe, which needs Transformer Engine."""
        if recipe is not None:
            raise ValueError(
                f"quantised recipe {recipe!r} (--fp8-recipe) needs --transformer-impl transformer_engine; "
                "the local implementation computes in the parameters' dtype"
            )
        return nullcontext()

    def checkpoint(self, function: Callable[..., Any], *args: Any) -> Any:
        """function(*args), recomputed in backward."""
        return checkpoint(function, *args, streams=self.options.rng)

    def rng_tracker(self) -> RngStreams | None:
        """LayerOptions.rng."""
        return self.options.rng

    def fused_adam(self) -> type[torch.optim.Optimizer] | None:
        """None: torch's own AdamW(fused=True) is as good."""
        return None

    def needs_backward_dw(self, module: nn.Module) -> bool:
        """Whether `module` delays its weight gradients."""
        return isinstance(module, DelayedWeightGradients) and module.need_backward_dw()
