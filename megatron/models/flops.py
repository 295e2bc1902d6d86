"""How many parameters a model has and how many floating-point operations it takes.

A multiply-add is two operations. Counted are the matrix multiplications of the model itself: linear layers,
attention scores and their weighted sum, the head. Recomputed activations do not count (model FLOPs, as in the
PaLM paper's MFU, https://arxiv.org/abs/2204.02311, appendix B), nor do norms, activations, rotations or the
embedding's look-up. Everything is a sum over layers, so that layers may differ.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.models.config import ModelConfig


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of the whole model, tied weights once, vocabulary padding left out.

    Attributes:
        total: all of them.
        active: those that one token meets (fewer than total with experts).
        embedding: word and position tables and an untied head, which scaling laws leave out.
    """

    total: int
    active: int
    embedding: int


def count_parameters(config: ModelConfig) -> ParameterCount:
    """Parameters by formula; tests hold them to the built model."""
    table = config.vocab_size * config.hidden_size
    embedding = table * (2 if config.untie_embeddings_and_output_weights else 1)
    if config.position_embedding_type == "learned_absolute":
        embedding += config.max_position_embeddings * config.hidden_size
    layers = sum(_attention_parameters(config) + _mlp_parameters(config) for _ in range(config.num_layers))
    total = embedding + layers + _norm_parameters(config, config.hidden_size)
    return ParameterCount(total=total, active=total, embedding=embedding)


def forward_flops(config: ModelConfig, sequence_length: int, *, causal: bool = True) -> float:
    """Operations of a forward pass over one sequence of `sequence_length` tokens.

    causal: count the half of the attention matrix that is needed, as Megatron does and flash kernels run.
    False counts all of it, as torch's FlopCounterMode and the PaLM paper do.
    """
    weights = sum(_attention_weights(config) + _mlp_weights(config) for _ in range(config.num_layers))
    weights += config.vocab_size * config.hidden_size
    pairs = sequence_length**2 * (0.5 if causal else 1.0)
    attention = config.num_layers * 4.0 * config.query_projection_size * pairs
    return 2.0 * weights * sequence_length + attention


def training_flops(config: ModelConfig, sequence_length: int, *, causal: bool = True) -> float:
    """Operations of forward and backward over one sequence: backward repeats each multiplication twice."""
    return 3.0 * forward_flops(config, sequence_length, causal=causal)


def _attention_weights(config: ModelConfig) -> int:
    return config.hidden_size * (config.qkv_projection_size + config.query_projection_size)


def _mlp_weights(config: ModelConfig) -> int:
    return config.hidden_size * config.ffn_hidden_size * (3 if config.gated_linear_unit else 2)


def _norm_parameters(config: ModelConfig, size: int) -> int:
    return size * (2 if config.normalization == "LayerNorm" else 1)


def _attention_parameters(config: ModelConfig) -> int:
    count = _attention_weights(config) + _norm_parameters(config, config.hidden_size)
    count += config.qkv_projection_size if config.qkv_bias else 0
    count += config.hidden_size if config.add_bias_linear else 0
    return count + (2 * _norm_parameters(config, config.kv_channels) if config.qk_layernorm else 0)


def _mlp_parameters(config: ModelConfig) -> int:
    count = _mlp_weights(config) + _norm_parameters(config, config.hidden_size)
    if config.add_bias_linear:
        count += config.ffn_hidden_size * (2 if config.gated_linear_unit else 1) + config.hidden_size
    return count
