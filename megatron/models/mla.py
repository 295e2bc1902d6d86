"""Multi-latent attention: queries, keys and values from narrow latents, and positions in channels of their own.

DeepSeek-V2 (https://arxiv.org/abs/2405.04434), section 2.1. Names and row order as in Megatron's checkpoints.

Note "Tensor parallelism". The down-projections are whole on every rank: under sequence parallelism on its piece of
the sequence, else all alike. The up-projections are cut by head. The rotary part of the key is one for all heads,
and each rank's heads use it differently: its gradient is summed over the ranks by the gather of the sequence, or,
where there is no piece to gather, by `copy_to`.

Note "Pairs". DeepSeek's weights have pairs of rotated channels side by side; they are taken apart into halves, which
changes no score since queries and keys are treated alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megatron.models.config import ModelConfig
from megatron.models.deepseek import MLAConfig
from megatron.models.mlp import set_weight_init
from megatron.models.rope import apply_rotary
from megatron.parallel.collectives import all_gather, copy_to
from megatron.parallel.recompute import DiscardedOutput

if TYPE_CHECKING:
    from megatron.models.block import AttentionInputs, LayerContext


class LatentAttention(nn.Module):
    """[s, b, hidden] -> [s, b, hidden], after a norm that stands alone.

    linear_q_proj, or linear_q_down_proj and linear_q_up_proj; linear_kv_down_proj, linear_kv_up_proj; core_attention;
    linear_proj. With --qk-layernorm the up-projections begin with a norm of the latent.
    """

    def __init__(self, context: LayerContext) -> None:
        super().__init__()
        config, mesh = context.config, context.mesh
        mla = config.mla
        assert mla is not None, "latent attention needs ModelConfig.mla"
        self._mla = mla
        self._interleaved = config.rotary.interleaved
        self._group, self._gathers = mesh.group("tp"), context.backend.options.sequence_parallel
        self._checkpoint = context.backend.checkpoint if config.recompute.selects("core_attn") else None
        self._discards_heads = config.recompute.selects("mla_up_proj")
        self._build_query(context, mla)
        self._build_key_value(context, mla)
        self.core_attention = context.backend.DotProductAttention(
            config.num_attention_heads,
            (mla.query_head_dim, mla.v_head_dim),
            attention_dropout=config.attention_dropout,
            attn_mask_type="causal",
            softmax_scale=latent_softmax_scale(config),
            layer_number=context.layer_number,
            cp_group=context.cp_group,
            cp_comm_type=context.cp_comm_type,
            **config.variants.attention_options(context.layer_number),
        )
        size = config.num_attention_heads * mla.v_head_dim
        self.linear_proj = _linear(context, size, config.hidden_size, "row", "proj")

    def _build_query(self, context: LayerContext, mla: MLAConfig) -> None:
        hidden = context.config.hidden_size
        rows = context.config.num_attention_heads * mla.query_head_dim
        self.linear_q_proj: nn.Module | None = None
        if mla.q_lora_rank is None:
            self.linear_q_proj = _linear(context, hidden, rows, "column", "q")
            return
        self.linear_q_down_proj = _linear(context, hidden, mla.q_lora_rank, None, "q_down")
        self.linear_q_up_proj = _up(context, mla.q_lora_rank, rows, "q_up")

    def _build_key_value(self, context: LayerContext, mla: MLAConfig) -> None:
        hidden, rank = context.config.hidden_size, mla.kv_lora_rank
        rows = context.config.num_attention_heads * (mla.qk_head_dim + mla.v_head_dim)
        self.linear_kv_down_proj = _linear(context, hidden, rank + mla.qk_pos_emb_head_dim, None, "kv_down")
        self.linear_kv_up_proj = _up(context, rank, rows, "kv_up")

    def forward(self, hidden: Tensor, inputs: AttentionInputs) -> Tensor:
        """hidden: normalised [s, b, hidden] (s / tp under sequence parallelism) -> the same shape."""
        assert inputs.rotary is not None, "latent attention needs rotary positions"
        latents, rotary = self._latents(hidden), inputs.rotary
        discarded = DiscardedOutput() if self._discards_heads else None
        if discarded is None:
            query, key, value = self._heads(rotary, *latents)
        else:
            query, key, value = discarded.call(lambda *latents: self._heads(rotary, *latents), *latents)
        if self._checkpoint is None:
            attended = self._attend(query, key, value, inputs)
        else:
            attended = self._checkpoint(self._attend, query, key, value, inputs)
        if discarded is not None:
            discarded.discard(attended)
        return self.linear_proj(attended)

    def _latents(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of queries (hidden itself without a query latent), of keys and values, and the rotary part of the key."""
        mla = self._mla
        query = hidden if self.linear_q_proj is not None else self.linear_q_down_proj(hidden)
        latent, shared = self.linear_kv_down_proj(hidden).split(
            (mla.kv_lora_rank, mla.qk_pos_emb_head_dim), -1
        )
        return query, latent, shared

    def _heads(
        self, rotary: tuple[Tensor, Tensor], query: Tensor, latent: Tensor, shared: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Query and key [s, b, heads, qk + pos], value [s, b, heads, v] of this rank's heads."""
        mla = self._mla
        query = self.linear_q_up_proj(query) if self.linear_q_proj is None else self.linear_q_proj(query)
        query = query.unflatten(-1, (-1, mla.query_head_dim))
        shared = all_gather(shared, self._group) if self._gathers else copy_to(shared, self._group)
        key_value = self.linear_kv_up_proj(latent).unflatten(-1, (-1, mla.qk_head_dim + mla.v_head_dim))
        key, value = key_value.split((mla.qk_head_dim, mla.v_head_dim), -1)
        query, turning = query.split((mla.qk_head_dim, mla.qk_pos_emb_head_dim), -1)
        query = torch.cat((query, self._turn(turning, rotary)), -1)
        shared = self._turn(shared.unsqueeze(2), rotary).expand(-1, -1, key.shape[2], -1)
        return query, torch.cat((key, shared), -1), value

    def _turn(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate [s, b, heads, pos] (note "Pairs")."""
        if not self._interleaved:
            x = torch.cat((x[..., 0::2], x[..., 1::2]), -1)
        return apply_rotary(x, rotary, self._interleaved)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, inputs: AttentionInputs) -> Tensor:
        if inputs.documents is not None:
            return self.core_attention(query, key, value, document_ids=inputs.documents)
        if inputs.mask is None:
            return self.core_attention(query, key, value)
        return self.core_attention(query, key, value, inputs.mask, attn_mask_type="arbitrary")


def latent_softmax_scale(config: ModelConfig) -> float:
    """mscale^2 / sqrt(head dim): YaRN sharpens attention over stretched positions."""
    assert config.mla is not None
    scale = config.softmax_scale or config.mla.query_head_dim**-0.5
    yarn = config.rotary.yarn
    return scale if yarn is None else scale * yarn.mscale_of(yarn.mscale_all_dim) ** 2


def _linear(context: LayerContext, size: int, rows: int, mode: str | None, name: str) -> nn.Module:
    init = context.config.linear_init(size, rows, writes_residual=mode == "row")
    module = context.backend.Linear(
        size,
        rows,
        bias=context.config.add_bias_linear,
        parallel_mode=mode,
        init_std=init.std,
        name=f"layer{context.layer_number}.{name}",
    )
    set_weight_init(module, init)
    return module


def _up(context: LayerContext, rank: int, rows: int, name: str) -> nn.Module:
    """From a latent to this rank's heads, through a norm with --qk-layernorm."""
    config = context.config
    if not config.qk_layernorm:
        return _linear(context, rank, rows, "column", name)
    init = config.linear_init(rank, rows)
    module = context.backend.LayerNormLinear(
        rank,
        rows,
        **config.norm_options,
        bias=config.add_bias_linear,
        parallel_mode="column",
        init_std=init.std,
        name=f"layer{context.layer_number}.{name}",
    )
    set_weight_init(module, init)
    return module
