"""One truth: losses and gradients of the model do not depend on tensor, sequence and context parallelism."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron.models.backends.base import LayerOptions
from megatron.models.backends.torch import TorchBackend
from megatron.models.backends.transformer_engine.attention import ContextParallel
from megatron.models.block import context_groups
from megatron.models.config import RecomputeConfig
from megatron.models.gpt import GPTModel
from megatron.models.init import Initializer, materialise
from megatron.models.variants import Variants
from megatron.parallel.annotate import annotation_of, global_shape, local_chunks
from megatron.parallel.context.balance import split
from megatron.parallel.mesh import ParallelMesh, ParallelSizes
from megatron.parallel.random import RngStreams
from tests.pool import run_ranks
from tests.unit.models.helpers import random_batch, relative_error, tiny_config

# Large enough weights that attention and gates are far from uniform.
SHAPE = {"padded_vocab_size": 64, "init_method_std": 0.2, "num_layers": 3, "max_position_embeddings": 32}
MODELS = {
    "gpt2": {**SHAPE, "qk_layernorm": True},
    "llama": {
        **SHAPE,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "activation": "silu",
        "gated_linear_unit": True,
        "ffn_hidden_size": 48,
        "num_query_groups": 2,
        "qk_layernorm": True,
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "untie_embeddings_and_output_weights": True,
    },
}
VARIANTS = {
    **SHAPE,
    "num_query_groups": 2,
    "normalization": "RMSNorm",
    "variants": Variants(
        window_size=(5, 0), softmax_type="learnable", output_gate=True, residual_post_layernorm=True
    ),
}
LENGTH = 16
DOCUMENTS = [[5, 8, 3], [16]]


def run_model(changes, mesh, sequence_parallel, documents):
    """Losses [b, s] of this rank's tokens, and its gradients, complete over tp (not over cp)."""
    config = tiny_config(**changes)
    options = LayerOptions.from_mesh(mesh, sequence_parallel=sequence_parallel, device="meta")
    model = materialise(GPTModel(config, TorchBackend(options), mesh), Initializer(21, mesh))
    tokens, labels = random_batch(config, length=LENGTH)
    positions = torch.arange(LENGTH).expand_as(tokens)
    ids = None
    if documents:
        ids = torch.stack(
            [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in DOCUMENTS]
        )
        positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in DOCUMENTS])
    mine = [split(item, 1, mesh.size("cp"), mesh.rank("cp")) for item in (tokens, positions, labels)]
    losses = model(mine[0], mine[1], labels=mine[2], document_ids=ids)
    losses.sum().backward()
    grads = {}
    for name, parameter in model.named_parameters():
        if annotation_of(parameter).replicated_gradient == "sum" and mesh.group("tp") is not None:
            dist.all_reduce(parameter.grad, group=mesh.group("tp"))
        grads[name] = parameter.grad
    return model, losses.detach(), grads


def run_rank(rank, world_size, changes, sizes, sequence_parallel, documents):
    """Losses in the order of the whole sequence, gradients as global tensors: sums over the ranks give both."""
    mesh = ParallelMesh(ParallelSizes(**sizes))
    model, losses, grads = run_model(changes, mesh, sequence_parallel, documents)
    order = split(torch.arange(LENGTH), 0, mesh.size("cp"), mesh.rank("cp"))
    whole_losses = torch.zeros(2, LENGTH)
    if mesh.rank("tp") == 0:
        whole_losses[:, order] = losses
    whole, replicas = {}, {}
    for name, parameter in model.named_parameters():
        annotation, size = annotation_of(parameter), mesh.size("tp")
        out = torch.zeros(global_shape(annotation, parameter.shape, size))
        for chunk in local_chunks(annotation, parameter.shape, mesh.rank("tp"), size):
            local = tuple(slice(o, o + n) for o, n in zip(chunk.local_offsets, chunk.sizes, strict=True))
            there = tuple(slice(o, o + n) for o, n in zip(chunk.global_offsets, chunk.sizes, strict=True))
            out[there] = grads[name][local]
        if annotation.tensor_parallel_dim is None:
            replicas[name] = out.clone()
            if mesh.rank("tp") != 0:
                out.zero_()
        whole[name] = out
    return whole_losses, whole, (mesh.rank("cp"), replicas)


CASES = [
    ("tp2", {"tensor": 2}, False, False),
    ("tp2-sp", {"tensor": 2}, True, False),
    ("tp4-sp", {"tensor": 4}, True, False),  # fewer query groups than ranks for the second model
    ("cp2", {"context": 2}, False, False),
    ("cp2-documents", {"context": 2}, False, True),
    ("tp2-sp-cp2", {"tensor": 2, "context": 2}, True, False),
]


@pytest.mark.parametrize(
    ("name", "sizes", "sequence_parallel", "documents"), CASES, ids=[c[0] for c in CASES]
)
@pytest.mark.parametrize("model", MODELS)
def test_equals_one_rank(model, name, sizes, sequence_parallel, documents):
    """P13 for gradients (replicated norms and biases), padding rows, tied and untied heads, documents over cp."""
    check_equals_one_rank(MODELS[model], sizes, sequence_parallel, documents)


def test_variants_equal_one_rank():
    """Gates, sinks and windows by head; norms that stand alone; query groups that ranks share."""
    check_equals_one_rank(VARIANTS, {"tensor": 4}, True, False)


def check_equals_one_rank(model, sizes, sequence_parallel, documents):
    world = 1
    for size in sizes.values():
        world *= size
    results = run_ranks(run_rank, world, model, sizes, sequence_parallel, documents, timeout=120)
    reference, losses, _ = run_model(model, ParallelMesh.single(), False, documents)
    assert relative_error(sum(item[0] for item in results), losses) < 1e-6
    for parameter_name, parameter in reference.named_parameters():
        expected = parameter.grad
        if parameter_name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            assert expected[61:].count_nonzero() == 0
            expected = expected[:61]
        got = sum(item[1][parameter_name] for item in results)
        if parameter_name.endswith("k_layernorm.bias"):
            assert got.norm() < 1e-4  # zero but for rounding: softmax does not see it
            continue
        assert relative_error(got, expected) < 2e-6, parameter_name
    for cp_rank, replicas in (item[2] for item in results):
        first = next(other for rank, other in (item[2] for item in results) if rank == cp_rank)
        assert all(torch.equal(value, first[key]) for key, value in replicas.items()), (
            "replicas differ over tp"
        )


def run_dropout(rank, world_size, sequence_parallel, recompute):
    """Two steps' losses, and the gradients, of a tensor-parallel model with dropout."""
    mesh = ParallelMesh(ParallelSizes(tensor=world_size))
    config = tiny_config(**{**SHAPE, "attention_dropout": 0.3, "hidden_dropout": 0.3, "recompute": recompute})
    streams = RngStreams.for_mesh(5, mesh)
    options = LayerOptions.from_mesh(mesh, sequence_parallel=sequence_parallel, device="meta", rng=streams)
    model = materialise(GPTModel(config, TorchBackend(options), mesh), Initializer(21, mesh))
    masks = []
    for block in model.decoder.layers.values():
        block.hidden_dropout.register_forward_hook(lambda module, args, out: masks.append(out == 0))
    tokens, labels = random_batch(config, length=LENGTH)
    losses = [model(tokens, labels=labels) for _ in range(2)]
    forward_masks = torch.stack(masks)
    sum(item.sum() for item in losses).backward()
    values = torch.stack(losses).detach()
    return values, [parameter.grad for parameter in model.parameters()], forward_masks


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "tp-sp"])
def test_dropout_under_tensor_parallelism(sequence_parallel):
    """Hidden states that ranks share lose the same channels, pieces of a sequence different ones; recompute replays
    every stream: the same bits.
    """
    plain = run_ranks(run_dropout, 2, sequence_parallel, RecomputeConfig(), timeout=120)
    masks = [item[2] for item in plain]
    assert 0.25 < masks[0].float().mean() < 0.35
    assert torch.equal(masks[0], masks[1]) is not sequence_parallel
    assert torch.equal(plain[0][0], plain[1][0])
    for recompute in (
        RecomputeConfig("full", "uniform", 2),
        RecomputeConfig("selective", modules=("core_attn", "mlp")),
    ):
        again = run_ranks(run_dropout, 2, sequence_parallel, recompute, timeout=120)
        for expected, got in zip(plain, again, strict=True):
            assert torch.equal(expected[0], got[0])
            assert all(torch.equal(a, b) for a, b in zip(expected[1], got[1], strict=True))


def two_level_groups(rank, world_size):
    """Groups of a2a+p2p, and what Transformer Engine is handed."""
    mesh = ParallelMesh(ParallelSizes(tensor=2, context=4))
    config = tiny_config(cp_comm_type=("a2a+p2p",), hierarchical_context_parallel_sizes=(2, 2))
    groups = context_groups(config, mesh, "a2a+p2p")
    handed = ContextParallel(groups, "a2a+p2p", None)
    assert handed.groups() == list(groups)
    return [dist.get_process_group_ranks(group) for group in groups], handed.ranks(), mesh.ranks("cp")


def test_rings_of_all_to_alls_have_neighbours_inside():
    found = run_ranks(two_level_groups, 8)
    assert [groups for groups, _, _ in found[:3]] == [[[0, 2], [0, 4]], [[1, 3], [1, 5]], [[0, 2], [2, 6]]]
    assert all(handed == whole for _, handed, whole in found)
