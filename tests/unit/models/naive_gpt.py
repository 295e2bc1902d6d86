"""The oracle of the model tests: a GPT in plain loops over heads, from a dict of weights with Megatron's
names.

Slow and obvious on purpose; shares no code with megatron.models.
"""

from __future__ import annotations

import math

import torch


def norm(x, weight, bias, config):
    weight = weight + 1 if config.layernorm_zero_centered_gamma else weight
    if config.normalization == "LayerNorm":
        x = x - x.mean(-1, keepdim=True)
    x = x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.layernorm_epsilon) * weight
    return x if bias is None else x + bias


def rotate(x, positions, config):
    """x: [s, d]; positions: [s]. Complex multiplication, pair by pair."""
    rotary, dim = config.rotary, int(config.kv_channels * config.rotary.percent)
    out = x.clone()
    for pair in range(dim // 2):
        frequency = rotary.base ** (-2.0 * pair / dim)
        if rotary.scaling_factor is not None:
            wavelength = 2 * math.pi / frequency
            if wavelength > 8192:
                frequency = frequency / rotary.scaling_factor
            elif wavelength > 8192 / 4:
                smooth = (8192 / wavelength - 1) / 3
                frequency = (1 - smooth) * frequency / rotary.scaling_factor + smooth * frequency
        angle = positions.double() * frequency / (rotary.seq_len_interpolation_factor or 1.0)
        cos, sin = torch.cos(angle).to(x.dtype), torch.sin(angle).to(x.dtype)
        first, second = (2 * pair, 2 * pair + 1) if rotary.interleaved else (pair, pair + dim // 2)
        out[:, first] = x[:, first] * cos - x[:, second] * sin
        out[:, second] = x[:, second] * cos + x[:, first] * sin
    return out


def activation(x, config):
    act = {
        "gelu_tanh": lambda t: 0.5 * t * (1 + torch.tanh(math.sqrt(2 / math.pi) * (t + 0.044715 * t**3))),
        "gelu": lambda t: 0.5 * t * (1 + torch.erf(t / math.sqrt(2))),
        "silu": lambda t: t / (1 + torch.exp(-t)),
        "relu": lambda t: t.clamp(min=0),
        "squared_relu": lambda t: t.clamp(min=0) ** 2,
        "quick_gelu": lambda t: t / (1 + torch.exp(-1.702 * t)),
    }[config.activation]
    if not config.gated_linear_unit:
        return act(x)
    half = x.shape[-1] // 2
    gate, up = x[..., :half], x[..., half:]
    if config.activation_func_clamp_value is not None:
        limit = config.activation_func_clamp_value
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return act(gate) * (up + config.glu_linear_offset)


def attention(x, get, config, positions, allowed, number=1):
    """x: [s, h] of one sample. number: of the layer, from 1."""
    variants = config.variants
    heads, groups, d = config.num_attention_heads, config.num_query_groups, config.kv_channels
    per_group = heads // groups
    if not variants.residual_post_layernorm:
        x = norm(x, get("linear_qkv.layer_norm_weight"), get("linear_qkv.layer_norm_bias"), config)
    qkv = x @ get("linear_qkv.weight").T
    if get("linear_qkv.bias") is not None:
        qkv = qkv + get("linear_qkv.bias")
    outputs = []
    for head in range(heads):
        group, index = divmod(head, per_group)
        gates = per_group if variants.output_gate else 0
        start = group * (per_group + gates + 2) * d
        q = qkv[:, start + index * d : start + (index + 1) * d]
        gate = qkv[:, start + (per_group + index) * d : start + (per_group + index + 1) * d]
        rest = start + (per_group + gates) * d
        k, v = qkv[:, rest : rest + d], qkv[:, rest + d : rest + 2 * d]
        if config.qk_layernorm:
            q = norm(q, get("q_layernorm.weight"), get("q_layernorm.bias"), config)
            k = norm(k, get("k_layernorm.weight"), get("k_layernorm.bias"), config)
        if variants.qk_l2_norm:
            q, k = (t / torch.sqrt((t * t).mean(-1, keepdim=True) + config.layernorm_epsilon) for t in (q, k))
        if config.position_embedding_type == "rope" and variants.has_rope(number):
            q, k = rotate(q, positions, config), rotate(k, positions, config)
        scores = q @ k.T * (config.attention_scale or 1 / math.sqrt(d))
        scores = scores.masked_fill(~allowed, float("-inf"))
        window = variants.window_of(number)
        for row in range(len(x) if window is not None else 0):
            for column in range(len(x)):
                if row - column > window[0]:
                    scores[row, column] = float("-inf")
        exponentials = torch.exp(scores)
        total = exponentials.sum(-1, keepdim=True)
        if variants.softmax_type == "off-by-one":
            total = total + 1
        if variants.softmax_type == "learnable":
            total = total + torch.exp(get("core_attention.softmax_offset")[head])
        out = exponentials / total @ v
        outputs.append(out * torch.sigmoid(gate) if variants.output_gate else out)
    out = torch.cat(outputs, -1) @ get("linear_proj.weight").T
    return out if get("linear_proj.bias") is None else out + get("linear_proj.bias")


def mlp(x, get, config):
    if not config.variants.residual_post_layernorm:
        x = norm(x, get("linear_fc1.layer_norm_weight"), get("linear_fc1.layer_norm_bias"), config)
    x = x @ get("linear_fc1.weight").T
    if get("linear_fc1.bias") is not None:
        x = x + get("linear_fc1.bias")
    x = activation(x, config) @ get("linear_fc2.weight").T
    return x if get("linear_fc2.bias") is None else x + get("linear_fc2.bias")


def naive_logits(weights, config, tokens, positions=None, allowed=None):
    """weights: name -> tensor (padding rows included). tokens: [b, s]. allowed: bool [b, s, s]. -> [b, s,
    vocab_size].
    """
    batch, length = tokens.shape
    logits = []
    for sample in range(batch):
        where = torch.arange(length) if positions is None else positions[sample]
        may = torch.ones(length, length, dtype=torch.bool).tril() if allowed is None else allowed[sample]
        mup = config.variants.mup
        x = weights["embedding.word_embeddings.weight"][tokens[sample]]
        if config.position_embedding_type == "learned_absolute":
            x = x + weights["embedding.position_embeddings.weight"][where]
        x = x if mup is None else x * mup.embedding_mult
        for layer in range(config.num_layers):
            prefix = f"decoder.layers.{layer}."
            if config.variants.residual_post_layernorm:
                x = norm(x, *(weights[prefix + "input_layernorm." + n] for n in ("weight", "bias")), config)
            x = x + attention(
                x, lambda n, p=prefix: weights.get(p + "self_attention." + n), config, where, may, layer + 1
            )
            if config.variants.residual_post_layernorm:
                x = norm(x, *(weights[prefix + "pre_mlp_layernorm." + n] for n in ("weight", "bias")), config)
            x = x + mlp(x, lambda n, p=prefix: weights.get(p + "mlp." + n), config)
        x = norm(
            x, weights["decoder.final_layernorm.weight"], weights.get("decoder.final_layernorm.bias"), config
        )
        head = weights.get("output_layer.weight", weights["embedding.word_embeddings.weight"])
        logits.append(
            x @ head[: config.vocab_size].T * (1.0 if mup is None else mup.output_mult / mup.width_mult)
        )
    return torch.stack(logits)


def naive_losses(logits, labels):
    """Per-token losses [b, s]."""
    return torch.logsumexp(logits, -1) - logits.gather(-1, labels[..., None]).squeeze(-1)
