"""Which tensor of a Hugging Face model is which of ours, family by family. Names of the published safetensors files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.models.config import ModelConfig
from megatron.tools.convert.mapping import (
    Copy,
    Joined,
    QueryGroups,
    Rows,
    Rule,
    Transposed,
    WeightMap,
)

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class _MLPNames:
    """Names in a layer: the module with the experts; the projections of an MLP."""

    experts: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


_PLAIN = _MLPNames()
_MIXTRAL = _MLPNames("block_sparse_moe", "w1", "w3", "w2")


def decoder_weights(config: ModelConfig) -> WeightMap:
    """Llama, Qwen3, Qwen3 with experts, DeepSeek-V3 with its prediction layers after the last layer."""
    return _decoder(config, _PLAIN)


def mixtral_weights(config: ModelConfig) -> WeightMap:
    """Mixtral: experts w1 (gate), w3 (up), w2 (down)."""
    return _decoder(config, _MIXTRAL)


def _decoder(config: ModelConfig, names: _MLPNames) -> WeightMap:
    rules, copies = [Rule("embedding.word_embeddings.weight", (_EMBEDDING,))], []
    for layer in range(config.num_layers):
        rules += _layer(config, names, layer, f"decoder.layers.{layer}.")
    rules.append(Rule("decoder.final_layernorm.weight", ("model.norm.weight",)))
    head = _HEAD
    if config.untie_embeddings_and_output_weights:
        rules.append(Rule("output_layer.weight", (_HEAD,)))
    else:
        copies.append(Copy(_HEAD, _EMBEDDING))
        head = _EMBEDDING
    for depth in range(config.mtp.num_layers if config.mtp else 0):
        layer = config.num_layers + depth
        theirs, ours = f"model.layers.{layer}.", f"mtp.layers.{depth}."
        rules += _layer(config, names, layer, f"{ours}transformer_layer.")
        for name in ("enorm", "hnorm", "eh_proj"):
            rules.append(Rule(f"{ours}{name}.weight", (f"{theirs}{name}.weight",)))
        rules.append(Rule(f"{ours}final_layernorm.weight", (f"{theirs}shared_head.norm.weight",)))
        copies.append(Copy(f"{theirs}embed_tokens.weight", _EMBEDDING, always=True))
        copies.append(Copy(f"{theirs}shared_head.head.weight", head, always=True))
    return WeightMap(tuple(rules), tuple(copies), lambda name: name.endswith(".rotary_emb.inv_freq"))


def _layer(config: ModelConfig, names: _MLPNames, layer: int, ours: str) -> Iterator[Rule]:
    """A transformer layer; `layer` counts prediction layers on after the last."""
    theirs = f"model.layers.{layer}."
    yield from (_latent_attention if config.mla else _attention)(config, ours, theirs)
    if config.moe is None or not config.moe.has_experts(layer):
        yield from _mlp(names, f"{ours}mlp.", f"{theirs}mlp.")
        yield Rule(f"{ours}mlp.linear_fc1.layer_norm_weight", (f"{theirs}post_attention_layernorm.weight",))
        return
    yield Rule(f"{ours}pre_mlp_layernorm.weight", (f"{theirs}post_attention_layernorm.weight",))
    module = f"{theirs}{names.experts}."
    yield Rule(f"{ours}mlp.router.weight", (f"{module}gate.weight",))
    if config.moe.enable_expert_bias:
        yield Rule(f"{ours}mlp.router.expert_bias", (f"{module}gate.e_score_correction_bias",))
    for expert in range(config.moe.num_experts):
        yield from _mlp(names, f"{ours}mlp.experts.", f"{module}experts.{expert}.", str(expert))
    if config.moe.shared_expert_intermediate_size is not None:
        yield from _mlp(names, f"{ours}mlp.shared_experts.", f"{module}shared_experts.")


def _mlp(names: _MLPNames, ours: str, theirs: str, number: str = "") -> Iterator[Rule]:
    """A gated MLP; `number` of an expert."""
    gate, up, down = (f"{theirs}{name}.weight" for name in (names.gate, names.up, names.down))
    yield Rule(f"{ours}linear_fc1.weight{number}", (gate, up), Rows())
    yield Rule(f"{ours}linear_fc2.weight{number}", (down,))


def _attention(config: ModelConfig, ours: str, theirs: str) -> Iterator[Rule]:
    ours, attention = f"{ours}self_attention.", f"{theirs}self_attn."
    yield Rule(f"{ours}linear_qkv.layer_norm_weight", (f"{theirs}input_layernorm.weight",))
    parts = tuple(f"{attention}{name}_proj.weight" for name in "qkv")
    groups = QueryGroups(config.num_query_groups, config.kv_channels)
    yield Rule(f"{ours}linear_qkv.weight", parts, groups)
    yield Rule(f"{ours}linear_proj.weight", (f"{attention}o_proj.weight",))
    if config.qk_layernorm:
        for name in "qk":
            yield Rule(f"{ours}{name}_layernorm.weight", (f"{attention}{name}_norm.weight",))


def _latent_attention(config: ModelConfig, ours: str, theirs: str) -> Iterator[Rule]:
    assert config.mla is not None
    yield Rule(f"{ours}input_layernorm.weight", (f"{theirs}input_layernorm.weight",))
    names = {
        "linear_kv_down_proj.weight": "kv_a_proj_with_mqa.weight",
        "linear_kv_up_proj.layer_norm_weight": "kv_a_layernorm.weight",
        "linear_kv_up_proj.weight": "kv_b_proj.weight",
        "linear_proj.weight": "o_proj.weight",
    }
    if config.mla.q_lora_rank is None:
        names["linear_q_proj.weight"] = "q_proj.weight"
    else:
        names["linear_q_down_proj.weight"] = "q_a_proj.weight"
        names["linear_q_up_proj.layer_norm_weight"] = "q_a_layernorm.weight"
        names["linear_q_up_proj.weight"] = "q_b_proj.weight"
    for mine, name in names.items():
        yield Rule(f"{ours}self_attention.{mine}", (f"{theirs}self_attn.{name}",))


def gpt2_weights(config: ModelConfig) -> WeightMap:
    """GPT-2: weights [in, out], queries, keys and values in one; causal masks among the tensors of old files."""
    rules = [
        Rule("embedding.word_embeddings.weight", ("transformer.wte.weight",)),
        Rule("embedding.position_embeddings.weight", ("transformer.wpe.weight",)),
    ]
    groups = Joined(QueryGroups(config.num_query_groups, config.kv_channels), 3)
    names = {
        "self_attention.linear_qkv": ("attn.c_attn", groups),
        "self_attention.linear_proj": ("attn.c_proj", None),
        "mlp.linear_fc1": ("mlp.c_fc", None),
        "mlp.linear_fc2": ("mlp.c_proj", None),
    }
    for layer in range(config.num_layers):
        ours, theirs = f"decoder.layers.{layer}.", f"transformer.h.{layer}."
        for mine, (name, form) in names.items():
            turned = Transposed() if form is None else Transposed(form)
            rules.append(Rule(f"{ours}{mine}.weight", (f"{theirs}{name}.weight",), turned))
            bias = (f"{theirs}{name}.bias",)
            rules.append(
                Rule(f"{ours}{mine}.bias", bias) if form is None else Rule(f"{ours}{mine}.bias", bias, form)
            )
        for part in ("weight", "bias"):
            rules.append(
                Rule(f"{ours}self_attention.linear_qkv.layer_norm_{part}", (f"{theirs}ln_1.{part}",))
            )
            rules.append(Rule(f"{ours}mlp.linear_fc1.layer_norm_{part}", (f"{theirs}ln_2.{part}",)))
    for part in ("weight", "bias"):
        rules.append(Rule(f"decoder.final_layernorm.{part}", (f"transformer.ln_f.{part}",)))
    copies = (Copy("lm_head.weight", "transformer.wte.weight"),)
    return WeightMap(tuple(rules), copies, lambda name: name.endswith((".attn.bias", ".attn.masked_bias")))
