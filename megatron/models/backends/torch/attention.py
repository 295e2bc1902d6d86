"""DotProductAttention on plain torch: scaled_dot_product_attention, and context-parallel attention.

Note "CPU": torch's tiled CPU kernel is three times faster than the plain one in fp32, but its bf16 backward
is over ten times slower than its fp32 one. So 16-bit inputs are computed in fp32 on CPU; the copies cost
little.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from megatron.models.backends.base import LayerOptions
from megatron.models.backends.torch.linear import split_options
from megatron.models.backends.torch.parameters import divide
from megatron.models.init import InitSpec
from megatron.parallel.annotate import ParameterAnnotation, annotate
from megatron.parallel.context import Documents, context_parallel_attention

# attn_mask_type -> (hides later positions, uses attention_mask)
MASK_TYPES: dict[str, tuple[bool, bool]] = {
    "no_mask": (False, False),
    "causal": (True, False),
    "padding": (False, True),
    "padding_causal": (True, True),
    "arbitrary": (False, True),
}
# qkv_format -> order of dims that gives [batch, heads, sequence, head_dim], and the way back.
FORMATS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "sbhd": ((1, 2, 0, 3), (2, 0, 1, 3)),
    "bshd": ((0, 2, 1, 3), (0, 2, 1, 3)),
}


class DotProductAttention(nn.Module):
    """softmax(scale q k^T + mask) v. Arguments as Backend.DotProductAttention, and LayerOptions or fields."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        *,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        softmax_scale: float | None = None,
        layer_number: int | None = None,
        cp_group: ProcessGroup | tuple[ProcessGroup, ProcessGroup] | None = None,
        cp_comm_type: str = "p2p",
        window_size: tuple[int, int] | None = None,
        softmax_type: str = "vanilla",
        options: LayerOptions | None = None,
        **layer_options: Any,
    ) -> None:
        super().__init__()
        options, _ = split_options(options, layer_options)
        groups = num_gqa_groups or num_attention_heads
        divide(num_attention_heads, groups, f"num_attention_heads (over num_gqa_groups={groups})")
        divide(num_attention_heads, options.tp_size, "num_attention_heads")
        if qkv_format not in (*FORMATS, "thd"):
            raise ValueError(f"qkv_format={qkv_format!r}: choose one of {', '.join(FORMATS)}, thd")
        self.head_dim = kv_channels if isinstance(kv_channels, int) else kv_channels[0]
        self.attention_dropout, self.softmax_scale = attention_dropout, softmax_scale
        self.qkv_format, self.attn_mask_type, self.layer_number = qkv_format, attn_mask_type, layer_number
        _mask_rule(attn_mask_type)
        self.cp_group, self.cp_comm_type = cp_group, cp_comm_type
        self._rng = options.rng
        self.window_size, self.softmax_type = window_size, softmax_type
        if cp_group is not None and (window_size is not None or softmax_type != "vanilla"):
            raise ValueError(
                f"--window-size {window_size} and --softmax-type {softmax_type} with --context-parallel-size > 1: "
                "torch's attention over several ranks has neither; use --context-parallel-size 1"
            )
        self.softmax_offset: nn.Parameter | None = None
        if softmax_type == "learnable":
            local = num_attention_heads // options.tp_size
            offset = torch.empty(local, dtype=options.params_dtype, device=options.device)
            where = ParameterAnnotation(tensor_parallel_dim=0 if options.tp_size > 1 else None)
            self.softmax_offset = nn.Parameter(offset)
            self.softmax_offset.init_spec = InitSpec("zeros")  # type: ignore[attr-defined]
            annotate(self.softmax_offset, where)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        attn_mask_type: str | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        document_ids: Documents | Tensor | None = None,
    ) -> Tensor:
        """Attention of each sample; shapes as in Backend.DotProductAttention.

        document_ids: of the whole sequence, [b, s] or Documents: no attention between documents ("sbhd"
            only). Also
        the way to pack documents under context parallelism.
        """
        causal, masked = _mask_rule(attn_mask_type or self.attn_mask_type)
        if masked and attention_mask is None:
            raise ValueError(
                f"attn_mask_type={attn_mask_type or self.attn_mask_type!r} needs an attention_mask"
            )
        qkv_format = qkv_format or self.qkv_format
        if qkv_format == "thd":
            return self._packed(query, key, value, cu_seqlens_q, causal)
        if self.cp_group is not None or document_ids is not None:
            mask = attention_mask if masked else None
            return self._context_parallel((query, key, value), mask, document_ids, causal)
        to_heads, back = FORMATS[qkv_format]
        q, k, v = (x.permute(to_heads) for x in (query, key, value))
        keep = _keep_mask(attention_mask, causal, q.shape[2], k.shape[2]) if masked else None
        if self.window_size is not None:
            window = window_mask(self.window_size, causal, q.shape[2], k.shape[2]).to(q.device)
            keep, masked = window if keep is None else keep & window, True
        with nullcontext() if self._rng is None or not self._dropout() else self._rng.fork():
            out = self._attend(q, k, v, keep, causal and not masked)
        return out.permute(back).flatten(2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, causal: bool) -> Tensor:
        if self.softmax_type == "vanilla":
            return attend(q, k, v, keep, causal, self._dropout(), self.softmax_scale)
        offset = self.softmax_offset
        sink = q.new_zeros(q.shape[1]) if offset is None else offset
        return attend_with_sink((q, k, v), sink, keep, causal, (self._dropout(), self.softmax_scale))

    def _dropout(self) -> float:
        return self.attention_dropout if self.training else 0.0

    def _packed(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, causal: bool) -> Tensor:
        if cu_seqlens is None or self.cp_group is not None:
            raise ValueError(
                "qkv_format='thd' needs cu_seqlens_q and no context parallelism (there give document_ids "
                "instead)"
            )
        ids = torch.repeat_interleave(cu_seqlens.diff())
        return self._context_parallel(
            tuple(x.unsqueeze(1) for x in (q, k, v)), None, ids[None], causal
        ).squeeze(1)

    def _context_parallel(
        self,
        qkv: tuple[Tensor, ...],
        mask: Tensor | None,
        document_ids: Documents | Tensor | None,
        causal: bool,
    ) -> Tensor:
        out = context_parallel_attention(
            *qkv,
            group=self.cp_group,
            kind=self.cp_comm_type,
            causal=causal,
            softmax_scale=self.softmax_scale,
            document_ids=document_ids,
            attention_mask=mask,
            attention_dropout=self._dropout(),
        )
        return out.flatten(2)

    def extra_repr(self) -> str:
        """Shown by repr()."""
        return f"{self.attn_mask_type}, dropout={self.attention_dropout}, cp={self.cp_comm_type}"


def attend(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, causal: bool, dropout: float, scale: float | None
) -> Tensor:
    """Attention of [b, heads, s, d] over [b, groups, s, d], [b, groups, s, v_dim] -> [b, heads, s, v_dim].

    keep: bool, broadcast to [b, heads, s_q, s_kv], False is hidden.
    """
    dtype, v_dim = q.dtype, v.shape[-1]
    if q.device.type == "cpu" and dtype in (torch.bfloat16, torch.float16):  # note "CPU"
        q, k, v = q.float(), k.float(), v.float()
    if v_dim != q.shape[-1]:
        # The fast kernels want one head dim. Zeros added to v add zeros to the output; to q and k, nothing to
        # scores.
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        width = max(v_dim, q.shape[-1])
        q, k, v = (F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(
        q, k, v, keep, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=grouped
    )
    return out[..., :v_dim].to(dtype)


def attend_with_sink(
    qkv: tuple[Tensor, Tensor, Tensor],
    sink: Tensor,
    keep: Tensor | None,
    causal: bool,
    dropout_and_scale: tuple[float, float | None],
) -> Tensor:
    """`attend` with exp(sink[head]) added to each sum of exponentials: probabilities may sum to less than one.

    https://arxiv.org/abs/2309.17453; written out in fp32 or wider. sink: [heads].
    """
    q, k, v = qkv
    (dropout, scale), dtype = dropout_and_scale, torch.promote_types(q.dtype, torch.float32)
    heads = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(heads, dim=1), v.repeat_interleave(heads, dim=1)
    scores = q.to(dtype) @ k.to(dtype).transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    if keep is not None:
        scores = scores.masked_fill(~keep, -torch.inf)
    column = sink.to(dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    probabilities = torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]
    probabilities = F.dropout(probabilities, dropout) if dropout else probabilities
    return (probabilities @ v.to(dtype)).to(q.dtype)


def window_mask(window: tuple[int, int], causal: bool, rows: int, columns: int) -> Tensor:
    """bool [rows, columns], True where a query sees a key: at most window[0] before it and window[1] after it.

    A negative number is no limit; causal attention sees nothing after it.
    """
    distance = torch.arange(columns)[None, :] - torch.arange(rows)[:, None]
    left, right = window[0], 0 if causal else window[1]
    seen = torch.ones(rows, columns, dtype=torch.bool)
    if left >= 0:
        seen &= distance >= -left
    if right >= 0:
        seen &= distance <= right
    return seen


def naive_attention(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, causal: bool, scale: float | None
) -> Tensor:
    """The oracle of `attend` (without dropout): scores, softmax and product written out."""
    heads = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(heads, dim=1), v.repeat_interleave(heads, dim=1)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        scores = scores.masked_fill(
            torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -torch.inf
        )
    if keep is not None:
        scores = scores.masked_fill(~keep, -torch.inf)
    return scores.softmax(-1) @ v


def _mask_rule(attn_mask_type: str) -> tuple[bool, bool]:
    if attn_mask_type not in MASK_TYPES:
        raise ValueError(f"attn_mask_type={attn_mask_type!r}: choose one of {', '.join(MASK_TYPES)}")
    return MASK_TYPES[attn_mask_type]


def _keep_mask(hidden: Tensor | None, causal: bool, rows: int, columns: int) -> Tensor:
    assert hidden is not None
    keep = ~hidden
    if causal:
        keep = keep & torch.ones(rows, columns, dtype=torch.bool, device=hidden.device).tril()
    return keep
