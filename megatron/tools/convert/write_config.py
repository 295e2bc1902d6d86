"""From a model of ours to a Hugging Face config.json."""

from __future__ import annotations

from typing import Any

from megatron.models.config import ModelConfig
from megatron.tools.convert.read_config import LLAMA3


def _shape_config(model: ModelConfig) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "hidden_size": model.hidden_size,
        "initializer_range": model.init_method_std,
        "intermediate_size": model.ffn_hidden_size,
        "max_position_embeddings": model.max_position_embeddings,
        "num_attention_heads": model.num_attention_heads,
        "num_hidden_layers": model.num_layers,
        "rms_norm_eps": model.layernorm_epsilon,
        "rope_theta": model.rotary.base,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "vocab_size": model.vocab_size,
    }


def grouped_config(model: ModelConfig) -> dict[str, Any]:
    rotary = model.rotary
    scaling: dict[str, Any] | None = None
    if rotary.scaling_factor is not None:
        scaling = {"rope_type": "llama3", "factor": rotary.scaling_factor, **LLAMA3}
    elif rotary.seq_len_interpolation_factor is not None:
        scaling = {"rope_type": "linear", "factor": rotary.seq_len_interpolation_factor}
    return {
        **_shape_config(model),
        "attention_bias": False,
        "head_dim": model.kv_channels,
        "num_key_value_heads": model.num_query_groups,
        "rope_scaling": scaling,
    }


def mixtral_config(model: ModelConfig) -> dict[str, Any]:
    assert model.moe is not None
    return {
        **grouped_config(model),
        "num_local_experts": model.moe.num_experts,
        "num_experts_per_tok": model.moe.topk,
        "intermediate_size": model.moe.ffn_hidden_size,
        "sliding_window": None,
    }


def qwen3_moe_config(model: ModelConfig) -> dict[str, Any]:
    moe = model.moe
    assert moe is not None
    return {
        **grouped_config(model),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, experts in enumerate(moe.pattern) if not experts],
        "moe_intermediate_size": moe.ffn_hidden_size,
        "norm_topk_prob": not moe.pre_softmax,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.topk,
    }


def deepseek_config(model: ModelConfig) -> dict[str, Any]:
    mla, moe, yarn = model.mla, model.moe, model.rotary.yarn
    if mla is None or moe is None:
        raise ValueError("a DeepSeek-V3 model has experts; this one has none, and no Hugging Face form")
    scaling = yarn and {
        "type": "yarn",
        "factor": yarn.scaling_factor,
        "original_max_position_embeddings": yarn.original_max_position,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "mscale": yarn.mscale,
        "mscale_all_dim": yarn.mscale_all_dim,
        **({} if yarn.round_to_int else {"truncate": False}),
    }
    return {
        **_shape_config(model),
        "attention_bias": False,
        "first_k_dense_replace": moe.pattern.index(True),
        "kv_lora_rank": mla.kv_lora_rank,
        "moe_intermediate_size": moe.ffn_hidden_size,
        "moe_layer_freq": 1,
        "n_group": moe.num_groups or 1,
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": (moe.shared_expert_intermediate_size or 0) // moe.ffn_hidden_size,
        "norm_topk_prob": True,
        "num_experts_per_tok": moe.topk,
        "num_key_value_heads": model.num_attention_heads,
        "num_nextn_predict_layers": model.mtp.num_layers if model.mtp else 0,
        "q_lora_rank": mla.q_lora_rank,
        "qk_nope_head_dim": mla.qk_head_dim,
        "qk_rope_head_dim": mla.qk_pos_emb_head_dim,
        "rope_scaling": scaling,
        "routed_scaling_factor": moe.topk_scaling_factor or 1.0,
        "scoring_func": "sigmoid",
        "topk_group": moe.group_topk or 1,
        "topk_method": "noaux_tc",
        "v_head_dim": mla.v_head_dim,
    }


def gpt2_config(model: ModelConfig) -> dict[str, Any]:
    return {
        "activation_function": "gelu",
        "attn_pdrop": model.attention_dropout,
        "embd_pdrop": model.hidden_dropout,
        "initializer_range": model.init_method_std,
        "layer_norm_epsilon": model.layernorm_epsilon,
        "n_embd": model.hidden_size,
        "n_head": model.num_attention_heads,
        "n_inner": model.ffn_hidden_size,
        "n_layer": model.num_layers,
        "n_positions": model.max_position_embeddings,
        "resid_pdrop": model.hidden_dropout,
        "tie_word_embeddings": True,
        "vocab_size": model.vocab_size,
    }
