"""DotProductAttention of the torch backend against attention written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.models.backends.base import LayerOptions
from megatron.models.backends.torch import DotProductAttention
from megatron.models.backends.torch.attention import MASK_TYPES, attend, naive_attention
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.random import RngStreams
from tests.unit.parallel.sharding import relative_error

BATCH, LENGTH, HEADS = 2, 12, 4


def _qkv(groups: int, dims: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """Query, key, value [s, b, heads or groups, dim]."""
    torch.manual_seed(0)
    shapes = ((HEADS, dims[0]), (groups, dims[0]), (groups, dims[1]))
    return [torch.randn(LENGTH, BATCH, *shape).to(dtype).requires_grad_() for shape in shapes]


def _hidden(mask_type: str) -> Tensor | None:
    """A mask, True = masked out."""
    if mask_type in ("padding", "padding_causal"):
        lengths = torch.tensor([LENGTH, LENGTH - 4])
        return (torch.arange(LENGTH) >= lengths[:, None])[:, None, None]
    if mask_type == "arbitrary":
        ids = torch.tensor([[0] * 5 + [1] * 7, [0] * 12])
        future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        return ((ids[:, :, None] != ids[:, None]) | future)[:, None]
    return None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("groups", "dims"), [(4, (8, 8)), (2, (8, 8)), (1, (12, 8)), (4, (8, 12))])
@pytest.mark.parametrize("mask_type", MASK_TYPES)
def test_equals_attention_written_out(
    mask_type: str, groups: int, dims: tuple[int, int], dtype: torch.dtype
) -> None:
    """Grouped heads, values of another width (as MLA's), every kind of mask, forward and backward."""
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-13, torch.bfloat16: 1e-2}[dtype]
    layer = DotProductAttention(
        HEADS, dims, num_gqa_groups=groups, attn_mask_type=mask_type, softmax_scale=0.3
    )
    qkv = _qkv(groups, dims, dtype)
    hidden = _hidden(mask_type)
    out = layer(*qkv, hidden)
    assert out.shape == (LENGTH, BATCH, HEADS * dims[1]) and out.dtype == dtype
    precise = [x.detach().double().requires_grad_() for x in qkv]
    keep = None if hidden is None else ~hidden
    expected = naive_attention(*(x.permute(1, 2, 0, 3) for x in precise), keep, "causal" in mask_type, 0.3)
    expected = expected.permute(2, 0, 1, 3).flatten(2)
    upstream = torch.linspace(-1, 1, out.numel()).view(out.shape)
    (out * upstream.to(dtype)).sum().backward()
    (expected * upstream).sum().backward()
    assert relative_error(out, expected) < tolerance
    for got, want in zip(qkv, precise, strict=True):
        assert relative_error(got.grad, want.grad) < tolerance


def test_batch_first_is_the_same() -> None:
    layer = DotProductAttention(HEADS, 8)
    qkv = _qkv(HEADS, (8, 8), torch.float32)
    other = layer(*(x.transpose(0, 1) for x in qkv), qkv_format="bshd")
    assert torch.equal(other.transpose(0, 1), layer(*qkv))


def test_documents_equal_each_alone() -> None:
    """D11: packed by ids, by cumulative lengths, or by a mask: as if every document were a sample of its own."""
    layer = DotProductAttention(HEADS, 8, num_gqa_groups=2)
    qkv = [x[:, :1].detach() for x in _qkv(2, (8, 8), torch.float32)]
    alone = torch.cat([layer(*(x[:5] for x in qkv)), layer(*(x[5:] for x in qkv))])
    ids = torch.tensor([[0] * 5 + [1] * 7])
    torch.testing.assert_close(layer(*qkv, document_ids=ids), alone)
    cu_seqlens = torch.tensor([0, 5, 12])
    packed = layer(*(x[:, 0] for x in qkv), qkv_format="thd", cu_seqlens_q=cu_seqlens)
    torch.testing.assert_close(packed, alone[:, 0])
    masked = layer(*qkv, _hidden("arbitrary")[:1], attn_mask_type="arbitrary")
    torch.testing.assert_close(masked, alone)


def test_dropout_runs_on_the_tensor_stream() -> None:
    """Heads differ between tensor-parallel ranks and so must what is dropped; none in eval."""
    streams = RngStreams.for_mesh(1, ParallelMesh.single())
    layer = DotProductAttention(HEADS, 8, attention_dropout=0.5, options=LayerOptions(rng=streams))
    qkv = [x.detach() for x in _qkv(HEADS, (8, 8), torch.float32)]
    default, tensor = torch.get_rng_state(), streams.state()["tensor"]
    out = layer(*qkv)
    assert torch.equal(default, torch.get_rng_state())
    assert not torch.equal(tensor, streams.state()["tensor"])
    assert not torch.equal(out, layer(*qkv))
    layer.eval()
    assert torch.equal(layer(*qkv), layer(*qkv))


def test_half_precision_on_cpu_is_computed_in_fp32() -> None:
    """Its backward kernel in bf16 is more than ten times slower: note "CPU" in attention.py."""
    q, k, v = (x.permute(1, 2, 0, 3).detach() for x in _qkv(HEADS, (8, 8), torch.bfloat16))
    exact = attend(q.float(), k.float(), v.float(), None, True, 0.0, None)
    assert torch.equal(attend(q, k, v, None, True, 0.0, None), exact.bfloat16())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"attn_mask_type": "diagonal"}, "attn_mask_type='diagonal': choose one of no_mask"),
        ({"qkv_format": "hsd"}, "qkv_format='hsd'"),
        ({"num_gqa_groups": 3}, r"num_attention_heads \(over num_gqa_groups=3\)=4"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DotProductAttention(HEADS, 8, **arguments)


def test_missing_masks_are_named() -> None:
    qkv = _qkv(HEADS, (8, 8), torch.float32)
    layer = DotProductAttention(HEADS, 8)
    with pytest.raises(ValueError, match="'arbitrary' needs an attention_mask"):
        layer(*qkv, attn_mask_type="arbitrary")
    with pytest.raises(ValueError, match="needs cu_seqlens_q"):
        layer(*(x[:, 0] for x in qkv), qkv_format="thd")


def test_meta() -> None:
    qkv = [x.detach().to("meta").requires_grad_() for x in _qkv(2, (8, 8), torch.float32)]
    DotProductAttention(HEADS, 8, num_gqa_groups=2)(*qkv).sum().backward()
    assert all(x.grad.shape == x.shape for x in qkv)
