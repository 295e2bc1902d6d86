"""The torch backend's word embedding."""

from __future__ import annotations

from torch import nn

from megatron.fsdp.unit import Unit
from megatron.models.backends.base import LayerOptions
from megatron.models.backends.torch.embedding import VocabParallelEmbedding


def test_backward_does_not_need_the_weight():
    """FSDP gathers the word embeddings for the forward only."""
    embedding = VocabParallelEmbedding(32, 8, options=LayerOptions())
    assert not Unit("embedding", (embedding,), []).backward_needs_parameters
    assert Unit("linear", (nn.Linear(2, 2),), []).backward_needs_parameters
