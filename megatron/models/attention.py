"""Self-attention with a fused, grouped query-key-value projection."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megatron.models.mlp import set_weight_init
from megatron.models.rope import apply_rotary
from megatron.parallel.query_groups import QueryGroups

if TYPE_CHECKING:
    from megatron.models.block import AttentionInputs, LayerContext


class SelfAttention(nn.Module):
    """Norm, linear_qkv, q/k norm, rotary positions, core_attention, linear_proj.

    Rows of linear_qkv go by query group: the group's query heads, its key, its value (Megatron's layout).
    Tensor-parallel ranks hold whole groups, or share them (megatron/parallel/query_groups.py).
    """

    def __init__(self, context: LayerContext) -> None:
        super().__init__()
        config, backend = context.config, context.backend
        heads, groups = config.num_attention_heads, config.num_query_groups
        variants = config.variants
        self._gated = variants.output_gate
        self._groups = QueryGroups(heads, groups, config.kv_channels, context.mesh, gated=self._gated)
        self._interleaved = config.rotary.interleaved
        self._turns = variants.has_rope(context.layer_number)
        self._checkpoint = backend.checkpoint if config.recompute.selects("core_attn") else None
        self._build_projections(context)
        self.core_attention = backend.DotProductAttention(
            heads,
            config.kv_channels,
            num_gqa_groups=max(groups, context.mesh.size("tp")),  # ranks that share a group hold it each
            attention_dropout=config.attention_dropout,
            attn_mask_type="causal",
            softmax_scale=config.attention_scale,
            layer_number=context.layer_number,
            cp_group=context.cp_group,
            cp_comm_type=context.cp_comm_type,
            **variants.attention_options(context.layer_number),
        )
        self.q_layernorm = head_norm(context)
        self.k_layernorm = head_norm(context)

    def _build_projections(self, context: LayerContext) -> None:
        config, backend = context.config, context.backend
        qkv_init = config.linear_init(config.hidden_size, config.qkv_projection_size)
        proj_init = config.linear_init(config.query_projection_size, config.hidden_size, writes_residual=True)
        self.linear_qkv = context.linear_after_norm(
            config.hidden_size,
            config.qkv_projection_size,
            bias=config.qkv_bias,
            parallel_mode="column",
            init_std=qkv_init.std,
            name=f"layer{context.layer_number}.qkv",
        )
        self.linear_proj = backend.Linear(
            config.query_projection_size,
            config.hidden_size,
            bias=config.add_bias_linear,
            parallel_mode="row",
            init_std=proj_init.std,
            name=f"layer{context.layer_number}.proj",
        )
        set_weight_init(self.linear_qkv, qkv_init)
        set_weight_init(self.linear_proj, proj_init)

    def forward(self, hidden: Tensor, inputs: AttentionInputs) -> Tensor:
        """hidden: [s, b, hidden] (s / tp under sequence parallelism) -> the same shape."""
        query, key, value, gate = self._groups.split(self.linear_qkv(hidden))
        if self.q_layernorm is not None and self.k_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        if inputs.rotary is not None and self._turns:
            query = apply_rotary(query, inputs.rotary, self._interleaved)
            key = apply_rotary(key, inputs.rotary, self._interleaved)
        if self._checkpoint is None:
            attended = self._attend(query, key, value, inputs)
        else:
            attended = self._checkpoint(self._attend, query, key, value, inputs)
        if gate is not None:
            wide = gate.to(torch.promote_types(gate.dtype, torch.float32))
            attended = (attended * torch.sigmoid(wide)).to(attended.dtype)
        return self.linear_proj(attended)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, inputs: AttentionInputs) -> Tensor:
        if inputs.documents is not None:
            return self.core_attention(query, key, value, document_ids=inputs.documents)
        if inputs.mask is None:
            return self.core_attention(query, key, value)
        return self.core_attention(query, key, value, inputs.mask, attn_mask_type="arbitrary")


class L2Norm(nn.Module):
    """x / sqrt(mean(x^2) + eps) over the channels of a head, without a weight (--qk-l2-norm)."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., channels] -> the same shape and dtype, computed in fp32 or wider."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def head_norm(context: LayerContext) -> nn.Module | None:
    """The norm of each head's queries or keys that the config asks for."""
    if context.config.variants.qk_l2_norm:
        return L2Norm(context.config.layernorm_epsilon)
    return context.head_norm() if context.config.qk_layernorm else None


def document_mask(document_ids: Tensor) -> Tensor:
    """Causal attention that stays inside a document.

    document_ids: [b, s] integers, equal within a document. Returns bool [b, 1, s, s], True = masked out.
    """
    s = document_ids.shape[1]
    other = document_ids[:, :, None] != document_ids[:, None, :]
    future = torch.ones(s, s, dtype=torch.bool, device=document_ids.device).triu(1)
    return (other | future)[:, None]
