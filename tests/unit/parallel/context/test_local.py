"""Kernels and blocks of one device against the attention that is written out."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.parallel.context import local
from megatron.parallel.context.attention import context_parallel_attention
from megatron.parallel.context.documents import Documents
from megatron.parallel.context.naive import document_mask, naive_attention

KERNELS = {"math": local.MathKernel(), "cpu_flash": local.CpuFlashKernel()}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def inputs(
    rows: int, keys: int, dims: tuple[int, int], groups: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * 1000 + keys)
    shapes = [(rows, 2, 4, dims[0]), (keys, 2, groups, dims[0]), (keys, 2, groups, dims[1])]
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return [x.requires_grad_() for x in drawn]


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_kernels_equal_naive_attention_forward_and_backward(name: str, dtype: torch.dtype) -> None:
    shapes = [(9, 9, True), (9, 9, False), (5, 8, False), (70, 3, False), (1, 1, True)]
    for (rows, keys, causal), groups, dims in itertools.product(
        shapes, (4, 2, 1), ((8, 8), (12, 4), (4, 12))
    ):
        q, k, v = inputs(rows, keys, dims, groups, dtype)
        reference = [x.detach().double().requires_grad_() for x in (q, k, v)]
        wanted = naive_attention(*reference, softmax_scale=0.4, causal=causal)
        torch.manual_seed(0)
        grad = torch.randn_like(wanted).to(dtype)
        wanted_grads = torch.autograd.grad(wanted, reference, grad.double())
        views = [x.detach().permute(1, 2, 0, 3) for x in (q, k, v)]
        out, lse = KERNELS[name].forward(*views, 0.4, causal)
        assert out.dtype == lse.dtype == local.accumulation_dtype(dtype)
        row = local.RowState(views[0], out.to(dtype), lse, grad.permute(1, 2, 0, 3))
        grads = KERNELS[name].backward(row, *views[1:], 0.4, causal)
        case = (rows, keys, causal, groups, dims)
        assert relative(out.permute(2, 0, 1, 3), wanted) < TOLERANCE[dtype], case
        for got, want in zip(grads, wanted_grads, strict=True):
            if want.norm() > 1e-9:  # one key: the softmax is constant and the gradients of q and k are zero
                assert relative(got.permute(2, 0, 1, 3), want) < TOLERANCE[dtype], case


def test_the_kernels_log_sum_exp_is_that_of_the_scaled_scores() -> None:
    q, k, v = (x.detach().permute(1, 2, 0, 3) for x in inputs(6, 6, (8, 8), 4, torch.float64))
    wanted = (0.3 * q @ k.transpose(-1, -2)).logsumexp(-1)
    for kernel in KERNELS.values():
        assert torch.allclose(kernel.forward(q, k, v, 0.3, False)[1], wanted, rtol=1e-13)


def test_the_choice_of_kernel() -> None:
    def chosen(device: str, dtype: torch.dtype, dim: int) -> type:
        with FakeTensorMode():
            x = torch.empty(4, 1, 2, dim, dtype=dtype, device=device)
        return type(local.choose_kernel(x, x))

    assert chosen("cpu", torch.float64, 8) is local.CpuFlashKernel
    assert chosen("cpu", torch.bfloat16, 300) is local.CpuFlashKernel
    assert chosen("cuda", torch.bfloat16, 128) is local.CudaFlashKernel
    assert chosen("cuda", torch.bfloat16, 264) is local.MathKernel
    assert chosen("cuda", torch.float32, 64) is local.MathKernel
    assert chosen("meta", torch.bfloat16, 64) is local.MathKernel


def test_the_cuda_kernel_fits_its_operators_signature_and_shapes() -> None:
    """Shapes and arguments only: numbers need a GPU."""
    kernel = local.CudaFlashKernel()
    with FakeTensorMode():
        q = torch.empty(2, 4, 16, 20, device="cuda", dtype=torch.bfloat16)
        k = torch.empty(2, 2, 24, 20, device="cuda", dtype=torch.bfloat16)
        v = torch.empty(2, 2, 24, 12, device="cuda", dtype=torch.bfloat16)
        out, lse = kernel.forward(q, k, v, 0.1, False)
        assert (out.shape, out.dtype) == ((2, 4, 16, 12), torch.float32)
        assert (lse.shape, lse.dtype) == ((2, 4, 16), torch.float32)
        row = local.RowState(q, out.to(q.dtype), lse, torch.empty_like(out, dtype=q.dtype))
        grads = kernel.backward(row, k, v, 0.1, False)
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kernel", KERNELS)
def test_one_rank_attention_of_documents_at_an_odd_length(kernel: str, causal: bool) -> None:
    q, k, v = inputs(13, 13, (8, 8), 2, torch.float64)
    documents = Documents(((0, 3, 9), (0,)), 13)
    mask = document_mask(documents.ids())
    out = context_parallel_attention(
        q, k, v, group=None, causal=causal, document_ids=documents.ids(), kernel=KERNELS[kernel]
    )
    wanted = naive_attention(q, k, v, softmax_scale=8**-0.5, causal=causal, mask=mask)
    grad = torch.randn_like(out)
    assert relative(out, wanted) < 1e-12
    pairs = zip(
        torch.autograd.grad(out, (q, k, v), grad), torch.autograd.grad(wanted, (q, k, v), grad), strict=True
    )
    assert all(relative(got, want) < 1e-12 for got, want in pairs)


def test_documents_equal_separate_forwards() -> None:
    """D11: a packed sample equals each of its documents alone."""
    q, k, v = inputs(12, 12, (8, 8), 2, torch.float64)
    out = context_parallel_attention(q, k, v, group=None, document_ids=Documents(((0, 5), (0, 5)), 12))
    alone = [context_parallel_attention(q[a:b], k[a:b], v[a:b], group=None) for a, b in ((0, 5), (5, 12))]
    assert relative(out, torch.cat(alone)) < 1e-13


def test_any_mask_on_one_rank_and_rows_that_see_nothing() -> None:
    q, k, v = inputs(6, 6, (8, 8), 2, torch.float64)
    mask = torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(0)) < 0.4
    mask[:, :, 3] = True
    out = context_parallel_attention(q, k, v, group=None, causal=False, attention_mask=mask)
    keys, values = (x.permute(1, 2, 0, 3).repeat_interleave(2, 1) for x in (k, v))
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q.permute(1, 2, 0, 3), keys, values, attn_mask=~mask
    )
    wanted = wanted.permute(2, 0, 1, 3)
    assert out[3].abs().max() == 0
    rows = [0, 1, 2, 4, 5]
    assert relative(out[rows], wanted[rows]) < 1e-12
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert all(bool(g.isfinite().all()) for g in grads)
    assert grads[0][3].abs().max() == 0


def test_dropout_on_one_rank_drops_probabilities_and_keeps_the_mean() -> None:
    q, k, v = (x.detach() for x in inputs(8, 8, (8, 8), 2, torch.float64))
    documents = Documents(((0, 3), (0,)), 8)
    attend = lambda p: context_parallel_attention(
        q, k, v, group=None, document_ids=documents, attention_dropout=p
    )
    torch.manual_seed(1)
    first = attend(0.3)
    torch.manual_seed(1)
    assert torch.equal(attend(0.3), first)
    assert not torch.equal(attend(0.3), first)
    mean = torch.stack([attend(0.3) for _ in range(400)]).mean(0)
    assert relative(mean, attend(0.0)) < 0.1
    assert (
        relative(first[:1], attend(0.0)[:1] / 0.7) < 1e-12 or first[:1].abs().min() == 0
    )  # one key: all or nothing


def test_strided_inputs_and_expanded_gradients() -> None:
    fused = torch.randn(8, 2, 4, 24, dtype=torch.float64, requires_grad=True)
    q, k, v = fused.chunk(3, dim=-1)
    (got,) = torch.autograd.grad(context_parallel_attention(q, k, v, group=None).sum(), fused)
    (want,) = torch.autograd.grad(naive_attention(q, k, v, softmax_scale=8**-0.5, causal=True).sum(), fused)
    assert relative(got, want) < 1e-12
    columns = torch.randn(8, 2, 8, 4, dtype=torch.float64).transpose(2, 3)
    out = context_parallel_attention(columns, columns, columns, group=None)
    assert (
        relative(out, naive_attention(columns, columns, columns, softmax_scale=8**-0.5, causal=True)) < 1e-12
    )


def test_gradients_numerically() -> None:
    q, k, v = inputs(5, 5, (4, 4), 2, torch.float64)
    documents = Documents(((0, 2), (0,)), 5)
    function = lambda *qkv: context_parallel_attention(*qkv, group=None, document_ids=documents)
    assert torch.autograd.gradcheck(function, (q, k, v), fast_mode=True)
