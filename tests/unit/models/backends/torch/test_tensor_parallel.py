"""Every layer of the torch backend equals one rank: tp 1, 2, 4, sequence parallel or not, fused wgrad or not."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.models.backends.base import LayerOptions
from megatron.models.backends.torch import TorchBackend
from megatron.parallel.annotate import annotation_of
from megatron.parallel.loss import vocab_parallel_cross_entropy
from megatron.parallel.mesh import ParallelMesh, ParallelSizes
from megatron.parallel.replicated import sum_replicated_gradients
from tests.pool import run_ranks
from tests.unit.parallel.sharding import join, load_cut, relative_error

SEQUENCE, BATCH, HIDDEN, FFN, VOCABULARY, PADDED = 8, 3, 16, 24, 29, 32


class Column(nn.Module):
    """Norm + column, with the normalised input as a second output, then row."""

    def __init__(self, backend: TorchBackend, normalization: str = "LayerNorm") -> None:
        super().__init__()
        self.fc1 = backend.LayerNormLinear(
            HIDDEN,
            2 * FFN,
            normalization=normalization,
            parallel_mode="column",
            tensor_parallel_parts=2,
            return_layernorm_output=True,
        )
        self.fc2 = backend.Linear(FFN, HIDDEN, parallel_mode="row")

    def forward(self, x: Tensor) -> Tensor:
        inner, normed = self.fc1(x)
        gate, up = inner.chunk(2, dim=-1)
        return self.fc2(torch.nn.functional.silu(gate) * up) + normed


class Plain(nn.Module):
    """A column without norm, a head norm on this rank's heads only, a row with its bias returned, a whole Linear."""

    def __init__(self, backend: TorchBackend) -> None:
        super().__init__()
        self.column = backend.Linear(HIDDEN, HIDDEN, parallel_mode="column", bias=False)
        self.head_norm = backend.RMSNorm(2, tensor_partial=True)
        self.row = backend.Linear(HIDDEN, HIDDEN, parallel_mode="row", return_bias=True)
        self.whole = backend.Linear(HIDDEN, HIDDEN)
        self.norm = backend.LayerNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.column(x)
        inner = self.head_norm(inner.unflatten(-1, (-1, 2))).flatten(-2)
        out, bias = self.row(torch.tanh(inner))
        return self.whole(self.norm(out + bias + x))


def _layers(backend: TorchBackend) -> dict[str, nn.Module]:
    return {
        "gated": Column(backend),
        "gated-rms": Column(backend, "RMSNorm"),
        "plain": Plain(backend),
        "mlp": backend.LayerNormMLP(HIDDEN, FFN, activation="gelu"),
        "mlp-swiglu": backend.LayerNormMLP(HIDDEN, FFN, activation="swiglu", normalization="RMSNorm"),
    }


def _spread(module: nn.Module) -> None:
    """Random values for all parameters, biases and norms too."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.5)


def _prepare_fused(module: nn.Module, fused: bool) -> None:
    for parameter in module.parameters():
        if fused:
            parameter.main_grad = torch.full_like(parameter, torch.nan)
            parameter.overwrite_main_grad = True


def _gradient(parameter: Tensor) -> Tensor:
    return parameter.grad if parameter.grad is not None else parameter.main_grad


def _run(module: nn.Module, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    out = module(x)
    (out * weight).sum().backward()
    return out.detach(), x.grad


def layer_cells(rank: int, world_size: int) -> dict[str, Any]:
    """All layers, sequence parallel or not, fused or not, on `world_size` tensor-parallel ranks."""
    mesh = ParallelMesh(ParallelSizes(tensor=world_size))
    results = {}
    for sequence_parallel, fused in itertools.product((False, True), repeat=2):
        options = LayerOptions.from_mesh(
            mesh, sequence_parallel=sequence_parallel, fuse_wgrad_accumulation=fused
        )
        assert options.sequence_parallel == (sequence_parallel and world_size > 1)
        torch.manual_seed(0)
        references = _layers(TorchBackend(LayerOptions()))
        for name, module in _layers(TorchBackend(options)).items():
            torch.manual_seed(1)
            _spread(references[name])
            x, weight = torch.randn(2, SEQUENCE, BATCH, HIDDEN)
            expected = _run(references[name], x, weight)
            load_cut(module, references[name], rank, world_size)
            _prepare_fused(module, fused)
            pieces = (t.chunk(world_size)[rank] if options.sequence_parallel else t for t in (x, weight))
            out, x_grad = _run(module, *pieces)
            named = list(module.named_parameters())
            sum_replicated_gradients([(annotation_of(p), _gradient(p)) for _, p in named], mesh)
            results[f"{name} sp={sequence_parallel} fused={fused}"] = {
                "outputs": (out, x_grad),
                "expected": expected,
                "whole": not options.sequence_parallel,
                "gradients": {n: (annotation_of(p), _gradient(p)) for n, p in named},
                "expected_gradients": {n: p.grad for n, p in references[name].named_parameters()},
            }
    return results


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_layers_equal_one_rank(world_size: int) -> None:
    """P13, F12: outputs, input and weight gradients; replicas bit for bit."""
    ranks = run_ranks(layer_cells, world_size)
    for cell, first in ranks[0].items():
        for what in (0, 1):
            got = [r[cell]["outputs"][what] for r in ranks]
            whole = got[0] if first["whole"] else torch.cat(got)
            assert relative_error(whole, first["expected"][what]) < 1e-6, (cell, what)
            if first["whole"]:
                assert all(torch.equal(g, got[0]) for g in got), (cell, "replicated outputs differ")
        for name, expected in first["expected_gradients"].items():
            annotation = first["gradients"][name][0]
            pieces = [r[cell]["gradients"][name][1] for r in ranks]
            assert relative_error(join(pieces, annotation), expected) < 1e-6, (cell, name)
            if annotation.tensor_parallel_dim is None:
                assert all(torch.equal(p, pieces[0]) for p in pieces), (cell, name, "replicas differ")


def embedding_and_head(rank: int, world_size: int) -> dict[str, Any]:
    """Embedding and loss head with a tied weight and padding rows."""
    mesh = ParallelMesh(ParallelSizes(tensor=world_size))
    results = {}
    for sequence_parallel, fused, chunked in itertools.product((False, True), repeat=3):
        options = LayerOptions.from_mesh(
            mesh, sequence_parallel=sequence_parallel, fuse_wgrad_accumulation=fused
        )
        backend = TorchBackend(options)
        embedding = backend.VocabParallelEmbedding(VOCABULARY, HIDDEN, num_padded_embeddings=PADDED)
        head = backend.VocabParallelHead(HIDDEN, PADDED)
        head.weight = embedding.weight
        torch.manual_seed(2)
        whole = torch.randn(VOCABULARY, HIDDEN)
        tokens, labels = torch.randint(VOCABULARY, (2, BATCH, SEQUENCE))
        first = rank * (PADDED // world_size)
        mine = whole[first : first + PADDED // world_size]
        with torch.no_grad():
            embedding.weight.zero_()[: mine.shape[0]] = mine
        _prepare_fused(embedding, fused)
        hidden = embedding(tokens)
        if chunked:
            losses = head(hidden, labels.t(), mine.shape[0])
        else:
            losses = vocab_parallel_cross_entropy(head(hidden), labels.t(), mesh.group("tp"), mine.shape[0])
        (losses * torch.arange(1.0, SEQUENCE + 1)[:, None]).sum().backward()
        gradient = embedding.weight.grad
        if fused:
            gradient = gradient + embedding.weight.main_grad
        results[f"sp={sequence_parallel} fused={fused} chunked={chunked}"] = (losses.detach(), gradient)
    return results


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_tied_embedding_and_loss_equal_one_rank(world_size: int) -> None:
    """X05 and the vocabulary's padding: no gradient, no share of the softmax."""
    ranks = run_ranks(embedding_and_head, world_size)
    torch.manual_seed(2)
    weight = torch.randn(VOCABULARY, HIDDEN, requires_grad=True)
    tokens, labels = torch.randint(VOCABULARY, (2, BATCH, SEQUENCE))
    logits = torch.nn.functional.embedding(tokens.t(), weight) @ weight.t()
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.t().flatten(), reduction="none")
    losses = losses.view(SEQUENCE, BATCH)
    (losses * torch.arange(1.0, SEQUENCE + 1)[:, None]).sum().backward()
    for cell in ranks[0]:
        for got, _ in (r[cell] for r in ranks):
            assert relative_error(got, losses.detach()) < 1e-6, cell
        gradient = torch.cat([r[cell][1] for r in ranks])
        assert relative_error(gradient[:VOCABULARY], weight.grad) < 1e-6, cell
        assert gradient[VOCABULARY:].eq(0).all(), cell


class _Log(TorchDispatchMode):
    """Names of the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket._qualified_op_name.split("::")[-1].strip("_"))
        return func(*args, **(kwargs or {}))


_TRACED = ("mm", "addmm", "allreduce", "allgather_base", "alltoall_base", "reduce_scatter_base")


def launches(rank: int, world_size: int, sequence_parallel: bool) -> list[str]:
    """Order of communication and GEMMs in backward of a column-parallel Linear."""
    mesh = ParallelMesh(ParallelSizes(tensor=world_size))
    options = LayerOptions.from_mesh(mesh, sequence_parallel=sequence_parallel, fuse_wgrad_accumulation=True)
    layer = TorchBackend(options).Linear(8, 4, bias=False, parallel_mode="column")
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    out = layer(torch.ones(2, 1, 8, requires_grad=True))
    with _Log() as log:
        out.sum().backward()
    return [name for name in log.names if name in _TRACED]


def test_input_gradient_is_launched_before_the_weight_gradient() -> None:
    """The collective of the input gradient goes out before the wgrad GEMM; SP gathers the input before dgrad."""
    assert run_ranks(launches, 2, False)[0] == ["mm", "allreduce", "addmm"]
    assert run_ranks(launches, 2, True)[0] == ["allgather_base", "mm", "alltoall_base", "addmm"]
