"""Transformer Engine's layer interface on plain torch."""

from megatron.models.backends.torch.attention import DotProductAttention
from megatron.models.backends.torch.backend import TorchBackend
from megatron.models.backends.torch.embedding import VocabParallelEmbedding
from megatron.models.backends.torch.grouped import GroupedLinear
from megatron.models.backends.torch.head import VocabParallelHead
from megatron.models.backends.torch.linear import LayerNormLinear, Linear
from megatron.models.backends.torch.mlp import LayerNormMLP
from megatron.models.backends.torch.norm import LayerNorm, RMSNorm

__all__ = [
    "DotProductAttention",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "RMSNorm",
    "TorchBackend",
    "VocabParallelEmbedding",
    "VocabParallelHead",
]
