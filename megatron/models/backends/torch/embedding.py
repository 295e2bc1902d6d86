"""Embedding cut over the tensor-parallel ranks along the vocabulary."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from megatron.models.backends.base import LayerOptions
from megatron.models.backends.torch.linear import split_options
from megatron.models.backends.torch.parameters import divide, new_parameter
from megatron.models.init import InitSpec
from megatron.parallel.annotate import ParameterAnnotation
from megatron.parallel.collectives import reduce_from, reduce_scatter


class VocabParallelEmbedding(nn.Module):
    """Each rank looks up the words it holds; the sum over the ranks is the embedding.

    Arguments as Backend.VocabParallelEmbedding, and LayerOptions or its fields. Its gradient is autograd's.
    """

    fsdp_backward_needs_parameters = False  # the gradient of a lookup needs the words, not the weight

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        num_padded_embeddings: int | None = None,
        init_std: float = 0.02,
        options: LayerOptions | None = None,
        **layer_options: Any,
    ) -> None:
        super().__init__()
        options, _ = split_options(options, layer_options)
        padded = num_padded_embeddings or num_embeddings
        if padded < num_embeddings:
            raise ValueError(f"num_padded_embeddings={padded} is less than num_embeddings={num_embeddings}")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self._group, self._sequence_parallel = options.tp_group, options.sequence_parallel
        rows = divide(padded, options.tp_size, "padded vocabulary size")
        self._first = 0 if self._group is None else self._group.rank() * rows
        num_global_rows = num_embeddings if padded > num_embeddings else None
        annotation = ParameterAnnotation(0, num_global_rows=num_global_rows)
        self.weight = new_parameter((rows, embedding_dim), options, InitSpec("normal", init_std), annotation)
        if not self.weight.is_meta:
            self.weight.data[max(0, num_embeddings - self._first) :] = 0

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [b, s] -> [s, b, embedding_dim]; under sequence parallelism this rank's [s / tp, b, ...]."""
        tokens = tokens.t()
        if self._group is None:
            return F.embedding(tokens, self.weight)
        local = tokens - self._first
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        found = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        found = found.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        if self._sequence_parallel:
            return reduce_scatter(found, self._group)
        return reduce_from(found, self._group)

    def extra_repr(self) -> str:
        """Shown by repr()."""
        return f"{self.num_embeddings}, {self.embedding_dim}, local {tuple(self.weight.shape)}"
