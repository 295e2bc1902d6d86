"""The layers under fake tensors and a fake process group of a thousand ranks: a planner runs the real code this way."""

from __future__ import annotations

import subprocess
import sys

import pytest

_SCRIPT = """
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from megatron.models.backends.base import LayerOptions
from megatron.models.backends.torch import TorchBackend
from megatron.parallel.mesh import ParallelMesh, ParallelSizes
from megatron.parallel.random import RngStreams

dist.init_process_group("fake", rank=100, world_size=1024, store=FakeStore())
mesh = ParallelMesh(ParallelSizes.of_world(1024, tensor=8, context=2, pipeline=2, expert=4))
streams = RngStreams.for_mesh(1, mesh)
with FakeTensorMode():
    options = LayerOptions.from_mesh(mesh, sequence_parallel=True, fuse_wgrad_accumulation=True, rng=streams)
    backend = TorchBackend(options)
    embedding = backend.VocabParallelEmbedding(1000, 64, num_padded_embeddings=1024)
    column = backend.LayerNormLinear(64, 128, parallel_mode="column")
    row = backend.Linear(128, 64, parallel_mode="row")
    head = backend.VocabParallelHead(64, 1024)
    attention = backend.DotProductAttention(8, 16, attention_dropout=0.1)
    for layer in (column, row, head):
        layer.weight.main_grad = torch.zeros_like(layer.weight)
    tokens = torch.randint(0, 1000, (2, 32))

    def block(x):
        heads = column(x).unflatten(-1, (1, 16))
        return row(attention(heads, heads, heads))

    loss = head(backend.checkpoint(block, embedding(tokens)), tokens.t(), 100)
    loss.sum().backward()
    assert loss.shape == (32, 2) and embedding.weight.grad.shape == (128, 64)
"""


@pytest.mark.full
def test_layers_run_in_a_fake_world_of_a_thousand_ranks() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr
