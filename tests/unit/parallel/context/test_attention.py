"""Every kind of context parallelism equals attention on one rank, forward and backward (X02, D11)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from megatron.parallel.context.attention import (
    KINDS,
    ContextParallelShape,
    check_context_parallel,
    context_parallel_attention,
)
from megatron.parallel.context.balance import split, split_batch, unsplit
from megatron.parallel.context.documents import Documents
from megatron.parallel.context.local import MathKernel
from megatron.parallel.context.naive import document_mask, naive_attention
from tests.pool import run_ranks

HEADS, BATCH = 4, 2
# bf16: outputs and gradients are rounded to 8 bits, gradients are of rounded outputs.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Cell:
    """One problem of the grid."""

    groups: int
    causal: bool
    starts: tuple[tuple[int, ...], ...] | None
    dtype: torch.dtype
    seq: int
    v_dim: int = 8
    math_kernel: bool = False


DOCUMENTS = (
    None,
    ((0, 3, 4, 11), (0,)),
    ((0, 8), (0, 2, 4, 6, 7, 10)),
)


def product(seqs: tuple[int, ...]) -> list[Cell]:
    """Return every combination of groups, mask, documents, dtype and length."""
    axes = (4, 2, 1), (True, False), DOCUMENTS, tuple(TOLERANCE), seqs
    return [Cell(*values) for values in itertools.product(*axes)]


def cover(cells: list[Cell]) -> list[Cell]:
    """Return cells, chosen greedily, that hold every pair of values of two axes of `cells`."""

    def pairs(cell: Cell) -> set[object]:
        axes = enumerate((cell.groups, cell.causal, cell.starts, cell.dtype, cell.seq))
        return set(itertools.combinations(axes, 2))

    missing = set().union(*(pairs(cell) for cell in cells))
    chosen = []
    while missing:
        chosen.append(max(cells, key=lambda cell: len(pairs(cell) & missing)))
        missing -= pairs(chosen[-1])
    return chosen


def odd_cells() -> list[Cell]:
    """Return a document per token, values of another width than keys, and the written-out kernel."""
    every_token = (tuple(range(16)), tuple(range(0, 16, 2)))
    cells = [Cell(2, causal, every_token, torch.float64, 16) for causal in (True, False)]
    cells += [Cell(2, True, starts, torch.float64, 16, v_dim) for starts in DOCUMENTS for v_dim in (4, 12)]
    return cells + [Cell(2, True, starts, torch.float64, 16, 8, True) for starts in DOCUMENTS]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)).item()


def make_groups(kind: str, world_size: int) -> object:
    """Return the group or, for a2a+p2p, the pair of groups of this rank."""
    if kind != "a2a+p2p":
        return dist.group.WORLD
    inner, _ = dist.new_subgroups_by_enumeration([[r, r + 1] for r in range(0, world_size, 2)])
    outer, _ = dist.new_subgroups_by_enumeration([list(range(first, world_size, 2)) for first in range(2)])
    return inner, outer


def run_cell(cell: Cell, kind: str, group: object, rank: int, size: int) -> list[float]:
    """Return relative errors of this rank's out, dq, dk and dv against the naive attention of one rank."""
    generator = torch.Generator().manual_seed(cell.seq + cell.groups)
    shapes = [(HEADS, 8), (cell.groups, 8), (cell.groups, cell.v_dim), (HEADS, cell.v_dim)]
    q, k, v, grad = (
        torch.randn(cell.seq, BATCH, *shape, generator=generator, dtype=torch.float64).to(cell.dtype)
        for shape in shapes
    )
    documents = None if cell.starts is None else Documents(cell.starts, cell.seq)
    mask = None if documents is None else document_mask(documents.ids())
    exact = torch.float64 if cell.dtype == torch.bfloat16 else cell.dtype
    whole = [x.to(exact).requires_grad_() for x in (q, k, v)]
    wanted = naive_attention(*whole, softmax_scale=8**-0.5, causal=cell.causal, mask=mask)
    wanted_grads = torch.autograd.grad(wanted, whole, grad.to(exact))
    local = [split(x, 0, size, rank).requires_grad_() for x in (q, k, v)]
    out = context_parallel_attention(
        *local,
        group=group,
        kind=kind,
        causal=cell.causal,
        document_ids=documents,
        kernel=MathKernel() if cell.math_kernel else None,
    )
    assert out.dtype == cell.dtype
    grads = torch.autograd.grad(out, local, split(grad, 0, size, rank))
    assert [g.dtype for g in grads] == [cell.dtype] * 3
    pairs = [(out, wanted), *zip(grads, wanted_grads, strict=True)]
    # The norm is of the whole tensor: with a document per token, some parts of dq are zero but for rounding.
    scales = [max(1e-30, want.double().norm().item()) for _, want in pairs]
    return [
        (got.double() - split(want, 0, size, rank).double()).norm().item() / scale
        if scale > 1e-12
        else got.norm().item()
        for (got, want), scale in zip(pairs, scales, strict=True)
    ]


def grid_worker(rank: int, world_size: int, kind: str, cells: list[Cell]) -> list[list[float]]:
    group = make_groups(kind, world_size)
    return [run_cell(cell, kind, group, rank, world_size) for cell in cells]


def check_grid(kind: str, size: int, cells: list[Cell]) -> None:
    for rank, errors in enumerate(run_ranks(grid_worker, size, kind, cells, timeout=180)):
        for cell, error in zip(cells, errors, strict=True):
            assert max(error) < TOLERANCE[cell.dtype], (rank, cell, error)


LAYOUTS = [(kind, size) for kind in KINDS for size in (1, 2, 4) if kind != "a2a+p2p" or size == 4]


@pytest.mark.parametrize(("kind", "size"), LAYOUTS)
def test_equals_one_rank(kind: str, size: int) -> None:
    check_grid(kind, size, cover(product((16, 24) if size > 1 else (16, 13))) + odd_cells())


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "size"), [*LAYOUTS, ("p2p", 3), ("p2p", 8), ("all_gather", 8), ("a2a+p2p", 8)]
)
def test_equals_one_rank_on_the_whole_grid(kind: str, size: int) -> None:
    unit = 2 * size
    check_grid(
        kind,
        size,
        product(tuple(-(-16 // unit) * unit + unit * i for i in range(2)) if size > 1 else (16, 13)),
    )


def bf16_worker(rank: int, world_size: int, kind: str) -> list[tuple[float, float]]:
    """Return errors against float64 of this layout and of one bf16 rank, for out, dq, dk, dv."""
    torch.manual_seed(3)
    q, k, v, grad = (torch.randn(512, 1, h, 32).bfloat16() for h in (4, 2, 2, 4))
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    wanted = naive_attention(*exact, softmax_scale=32**-0.5, causal=True)
    wanted = [wanted, *torch.autograd.grad(wanted, exact, grad.double())]

    def run(size: int, part: int, group: object) -> list[torch.Tensor]:
        local = [split(x, 0, size, part).requires_grad_() for x in (q, k, v)]
        out = context_parallel_attention(*local, group=group, kind=kind)
        return [out, *torch.autograd.grad(out, local, split(grad, 0, size, part))]

    mine = run(world_size, rank, dist.group.WORLD)
    one = run(1, 0, None)
    references = [split(x, 0, world_size, rank) for x in wanted]
    ones = [split(x, 0, world_size, rank) for x in one]
    return [(relative(a, c), relative(b, c)) for a, b, c in zip(mine, ones, references, strict=True)]


@pytest.mark.parametrize("kind", ["p2p", "a2a", "all_gather"])
def test_bf16_is_as_exact_as_one_rank(kind: str) -> None:
    for errors in run_ranks(bf16_worker, 4, kind):
        for mine, one in errors:
            # a2a adds up the gradients of repeated groups that were rounded to travel: sqrt(2) more error.
            assert mine < (1.5 if kind == "a2a" else 1.05) * one, errors
            assert one < 6e-3


def recompute_worker(rank: int, world_size: int, kind: str) -> None:
    torch.manual_seed(0)
    qkv = [
        split(torch.randn(16, 2, 4, 8, dtype=torch.float64), 0, world_size, rank).requires_grad_()
        for _ in range(3)
    ]
    attend = lambda q, k, v: context_parallel_attention(q, k, v, group=dist.group.WORLD, kind=kind).square()
    plain = attend(*qkv)
    plain_grads = torch.autograd.grad(plain.sum(), qkv)
    again = checkpoint(attend, *qkv, use_reentrant=False)
    grads = torch.autograd.grad(again.sum(), qkv)
    assert torch.equal(plain, again)
    assert all(torch.equal(a, b) for a, b in zip(plain_grads, grads, strict=True))
    reentrant = checkpoint(attend, *qkv, use_reentrant=True)
    reentrant.sum().backward()
    assert all(torch.equal(x.grad, g) for x, g in zip(qkv, plain_grads, strict=True))
    with torch.no_grad():
        out = attend(*qkv)
    assert not out.requires_grad
    assert torch.equal(out, plain)


@pytest.mark.parametrize("kind", ["p2p", "a2a", "all_gather"])
def test_recompute_and_no_grad(kind: str) -> None:
    run_ranks(recompute_worker, 2, kind)


def frozen_worker(rank: int, world_size: int, kind: str) -> None:
    """Only the values want a gradient on one run, only the queries on another."""
    torch.manual_seed(0)
    qkv = [split(torch.randn(16, 1, 4, 8, dtype=torch.float64), 0, world_size, rank) for _ in range(3)]
    full = [x.clone().requires_grad_() for x in qkv]
    out = context_parallel_attention(*full, group=dist.group.WORLD, kind=kind)
    wanted = torch.autograd.grad(out.square().sum(), full)
    for index in range(3):
        some = [x.clone().requires_grad_(i == index) for i, x in enumerate(qkv)]
        out = context_parallel_attention(*some, group=dist.group.WORLD, kind=kind)
        (grad,) = torch.autograd.grad(out.square().sum(), some[index : index + 1])
        assert torch.equal(grad, wanted[index])


@pytest.mark.parametrize("kind", ["p2p", "a2a", "all_gather"])
def test_inputs_without_gradient(kind: str) -> None:
    run_ranks(frozen_worker, 2, kind)


def model_losses(
    weights: dict[str, torch.Tensor], batch: dict, documents: Documents, group: object, kind: str
):
    """Return per-token losses [b, s_local] of a one-layer model: embedding, positions, attention, head."""
    x = weights["embedding"][batch["tokens"]] + weights["position"][batch["position_ids"]]
    q, k, v = ((x.transpose(0, 1) @ weights[name]).unflatten(-1, (4, 8)) for name in ("q", "k", "v"))
    out = context_parallel_attention(q, k, v, group=group, kind=kind, document_ids=documents)
    logits = out.flatten(2).transpose(0, 1) @ weights["head"]
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none").view(
        x.shape[:2]
    )


def loss_and_gradients(weights: dict, batch: dict, documents: Documents, group: object, kind: str):
    """Return the mean loss over the valid tokens of all ranks, and its gradients summed over ranks."""
    weights = {name: value.clone().requires_grad_() for name, value in weights.items()}
    total = (model_losses(weights, batch, documents, group, kind) * batch["loss_mask"]).sum()
    counts = torch.stack([total.detach(), batch["loss_mask"].sum()])
    grads = torch.autograd.grad(total, list(weights.values()))
    if group is not None:
        for tensor in (counts, *grads):
            dist.all_reduce(tensor, group=group)
    valid = counts[1].clamp(min=1)
    return counts[0] / valid, [grad / valid for grad in grads]


def labels_worker(rank: int, world_size: int, kind: str, all_masked: bool) -> None:
    torch.manual_seed(0)
    width, seq, vocabulary = 32, 16, 11
    weights = {name: torch.randn(width, width).double() / 6 for name in ("q", "k", "v")}
    weights["embedding"] = torch.randn(vocabulary, width).double()
    weights["position"] = torch.randn(seq, width).double()
    weights["head"] = torch.randn(width, vocabulary).double() / 6
    tokens = torch.randint(vocabulary, (2, seq + 1))
    documents = Documents.from_tokens(tokens[:, :-1], eod=0)
    batch = {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "position_ids": documents.position_ids(),
        "loss_mask": torch.ones(2, seq).double(),
    }
    quarter = seq // 4
    batch["loss_mask"][:, quarter : 3 * quarter] = 0  # rank 1's chunks
    batch["loss_mask"][0, 1] = 0
    if all_masked:
        batch["loss_mask"].zero_()
    wanted_loss, wanted = loss_and_gradients(weights, batch, documents, None, kind)
    local = split_batch(batch, world_size, rank)
    assert rank == 0 or local["loss_mask"].sum() == 0
    loss, grads = loss_and_gradients(weights, local, documents, dist.group.WORLD, kind)
    assert bool(loss.isfinite())
    assert abs(loss - wanted_loss) <= 1e-13 * abs(wanted_loss)
    for got, want in zip(grads, wanted, strict=True):
        assert bool(got.isfinite().all())
        assert (got - want).norm() <= 1e-12 * want.norm()


@pytest.mark.parametrize("all_masked", [False, True])
@pytest.mark.parametrize("kind", ["p2p", "a2a", "all_gather"])
def test_a_rank_without_valid_labels_is_finite_and_equal(kind: str, all_masked: bool) -> None:
    """X02: no valid label on rank 1, and none anywhere."""
    run_ranks(labels_worker, 2, kind, all_masked)


def tensor_ids_worker(rank: int, world_size: int) -> torch.Tensor:
    torch.manual_seed(0)
    ids = torch.tensor([[4, 4, 4, 9, 9, 9, 9, 9]])
    q, k, v = (split(torch.randn(8, 1, 2, 4, dtype=torch.float64), 0, world_size, rank) for _ in range(3))
    out = context_parallel_attention(q, k, v, group=dist.group.WORLD, document_ids=ids)
    with pytest.raises(ValueError, match="1 samples of 4 tokens.*before the context-parallel split"):
        context_parallel_attention(q, k, v, group=dist.group.WORLD, document_ids=ids[:, :4])
    with pytest.raises(ValueError, match="attention_mask.*--context-parallel-size 2.*--reset-attention-mask"):
        context_parallel_attention(q, k, v, group=dist.group.WORLD, attention_mask=torch.zeros(8, 8).bool())
    with pytest.raises(ValueError, match="--attention-dropout 0.1 with --context-parallel-size 2"):
        context_parallel_attention(q, k, v, group=dist.group.WORLD, attention_dropout=0.1)
    with pytest.raises(ValueError, match=r"--seq-length 6 .*use --seq-length 8"):
        context_parallel_attention(q[:3], k[:3], v[:3], group=dist.group.WORLD)
    with pytest.raises(ValueError, match=r"--cp-comm-type a2a.*--num-attention-heads \(1 "):
        context_parallel_attention(q[:, :, :1], k[:, :, :1], v[:, :, :1], group=dist.group.WORLD, kind="a2a")
    with pytest.raises(ValueError, match="a2a\\+p2p needs two groups.*--hierarchical-context-parallel-sizes"):
        context_parallel_attention(q, k, v, group=dist.group.WORLD, kind="a2a+p2p")
    return out


def test_ids_as_a_tensor_and_bad_input() -> None:
    out = unsplit(run_ranks(tensor_ids_worker, 2), 0)
    torch.manual_seed(0)
    q, k, v = (torch.randn(8, 1, 2, 4, dtype=torch.float64) for _ in range(3))
    alone = [
        naive_attention(q[a:b], k[a:b], v[a:b], softmax_scale=0.5, causal=True) for a, b in ((0, 3), (3, 8))
    ]
    assert relative(out, torch.cat(alone)) < 1e-12


def test_bad_input_on_one_rank() -> None:
    q = torch.randn(6, 1, 4, 8)
    with pytest.raises(
        ValueError, match="--cp-comm-type ring is unknown: use one of p2p, all_gather, a2a, a2a"
    ):
        context_parallel_attention(q, q, q, group=None, kind="ring")
    with pytest.raises(ValueError, match="--num-query-groups \\(3 "):
        context_parallel_attention(q, q[:, :, :3], q[:, :, :3], group=None)


def test_checks_before_anything_is_built() -> None:
    good = {"seq_length": 32, "size": 4, "kind": "a2a", "num_heads": 8, "num_groups": 2}
    check_context_parallel(ContextParallelShape(**good))
    check_context_parallel(ContextParallelShape(**{**good, "kind": "a2a+p2p", "all_to_all_size": 2}))
    check_context_parallel(ContextParallelShape(7, 1, "p2p", 3, 3, 0.1))
    cases = {
        "--cp-comm-type alltoall": {"kind": "alltoall"},
        "--seq-length 36.*--context-parallel-size": {"seq_length": 36},
        "--num-attention-heads \\(6 ": {"num_heads": 6},
        "--num-query-groups \\(3 ": {"num_groups": 3},
        "--attention-dropout 0.2": {"attention_dropout": 0.2},
        "--hierarchical-context-parallel-sizes": {"kind": "a2a+p2p"},
        "--context-parallel-size 4; the first is 3": {"kind": "a2a+p2p", "all_to_all_size": 3},
    }
    for message, change in cases.items():
        with pytest.raises(ValueError, match=message):
            check_context_parallel(ContextParallelShape(**{**good, **change}))
