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
    """Parameters by formula; tests hold them to the built model. Layers of multi-token prediction are counted too."""
    table = config.vocab_size * config.hidden_size
    embedding = table * (2 if config.untie_embeddings_and_output_weights else 1)
    if config.position_embedding_type == "learned_absolute":
        embedding += config.max_position_embeddings * config.hidden_size
    rest = embedding + _norm_parameters(config, config.hidden_size)
    if config.mtp is not None:
        norms = 3 * _norm_parameters(config, config.hidden_size)
        rest += config.mtp.built_layers * (2 * config.hidden_size**2 + norms)
    layers = range(config.num_layers + (0 if config.mtp is None else config.mtp.built_layers))
    attention = len(layers) * _attention_parameters(config)
    total = sum(_mlp_parameters(config, index, active=False) for index in layers)
    active = sum(_mlp_parameters(config, index, active=True) for index in layers)
    return ParameterCount(
        total=rest + attention + total, active=rest + attention + active, embedding=embedding
    )


def forward_flops(config: ModelConfig, sequence_length: int, *, causal: bool = True) -> float:
    """Operations of a forward pass over one sequence of `sequence_length` tokens.

    causal: count the half of the attention matrix that is needed, as Megatron does and flash kernels run.
    False counts all of it, as torch's FlopCounterMode and the PaLM paper do.
    """
    layers = range(_num_layers(config))
    weights = sum(_attention_weights(config) + _mlp_weights(config, index, active=True) for index in layers)
    predictions = len(layers) - config.num_layers
    weights += (
        config.vocab_size * config.hidden_size * (1 + predictions) + predictions * 2 * config.hidden_size**2
    )
    pairs = sequence_length**2 * (0.5 if causal else 1.0)
    attention = len(layers) * 2.0 * sum(_head_dims(config)) * config.num_attention_heads * pairs
    return 2.0 * weights * sequence_length + attention


def training_flops(config: ModelConfig, sequence_length: int, *, causal: bool = True) -> float:
    """Operations of forward and backward over one sequence: backward repeats each multiplication twice."""
    return 3.0 * forward_flops(config, sequence_length, causal=causal)


def _num_layers(config: ModelConfig) -> int:
    """Transformer layers, with those of multi-token prediction."""
    return config.num_layers + (0 if config.mtp is None else config.mtp.num_layers)


def _head_dims(config: ModelConfig) -> tuple[int, int]:
    """Channels of a head: of queries and keys, of values."""
    if config.mla is None:
        return config.kv_channels, config.kv_channels
    return config.mla.query_head_dim, config.mla.v_head_dim


def _attention_shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """(inputs, outputs) of each linear layer of attention."""
    hidden, heads, mla = config.hidden_size, config.num_attention_heads, config.mla
    if mla is None:
        return [(hidden, config.qkv_projection_size), (config.query_projection_size, hidden)]
    query = heads * mla.query_head_dim
    shapes = [
        (hidden, mla.kv_lora_rank + mla.qk_pos_emb_head_dim),
        (mla.kv_lora_rank, heads * (mla.qk_head_dim + mla.v_head_dim)),
        (heads * mla.v_head_dim, hidden),
    ]
    rank = mla.q_lora_rank
    return [*shapes, *([(hidden, query)] if rank is None else [(hidden, rank), (rank, query)])]


def _attention_weights(config: ModelConfig) -> int:
    return sum(inputs * outputs for inputs, outputs in _attention_shapes(config))


def _norm_parameters(config: ModelConfig, size: int) -> int:
    return size * (2 if config.normalization == "LayerNorm" else 1)


def _attention_parameters(config: ModelConfig) -> int:
    count = _attention_weights(config) + _norm_parameters(config, config.hidden_size)
    if config.mla is not None:
        ranks = [config.mla.kv_lora_rank, config.mla.q_lora_rank or 0]
        count += sum(_norm_parameters(config, rank) for rank in ranks) if config.qk_layernorm else 0
        return count + (sum(out for _, out in _attention_shapes(config)) if config.add_bias_linear else 0)
    count += config.qkv_projection_size if config.qkv_bias else 0
    count += config.hidden_size if config.add_bias_linear else 0
    count += config.num_attention_heads if config.variants.softmax_type == "learnable" else 0
    return count + (2 * _norm_parameters(config, config.kv_channels) if config.qk_layernorm else 0)


def _feed_forward(config: ModelConfig, ffn_hidden_size: int, *, biases: bool) -> int:
    """Weights of one MLP or expert, with `biases` those too."""
    parts = 2 if config.gated_linear_unit else 1
    count = config.hidden_size * ffn_hidden_size * (parts + 1)
    return count + (ffn_hidden_size * parts + config.hidden_size if biases else 0)


def _mlp_weights(config: ModelConfig, layer_index: int, *, active: bool, biases: bool = False) -> int:
    """Weights of the feed-forward part of a layer; `active`: that one token meets."""
    moe = config.moe
    if moe is None or not moe.has_experts(layer_index):
        return _feed_forward(config, config.ffn_hidden_size, biases=biases)
    experts = moe.topk if active else moe.num_experts
    count = moe.num_experts * config.hidden_size
    count += experts * _feed_forward(config, moe.ffn_hidden_size, biases=biases)
    if moe.shared_expert_intermediate_size is not None:
        count += _feed_forward(config, moe.shared_expert_intermediate_size, biases=biases)
    return count + (config.hidden_size if moe.shared_expert_gate else 0)


def _mlp_parameters(config: ModelConfig, layer_index: int, *, active: bool) -> int:
    weights = _mlp_weights(config, layer_index, active=active, biases=config.add_bias_linear)
    return weights + _norm_parameters(config, config.hidden_size)
