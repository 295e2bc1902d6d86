"""From a Hugging Face config.json to Megatron's flags; a ValueError naming file and key for what ours cannot be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Flags = dict[str, bool | int | float | str]

# Llama 3.1's constants, which megatron/models/rope.py has too.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True)
class HuggingFaceConfig:
    """A config.json. predictions: prediction layers that the model's files hold."""

    path: Path
    values: Mapping[str, Any]
    predictions: int = 0

    def get(self, name: str, default: Any = None) -> Any:
        """The value, or `default` where it is missing or null."""
        value = self.values.get(name)
        return default if value is None else value

    def need(self, name: str) -> Any:
        """The value. Raises ValueError if it is missing."""
        value = self.values.get(name)
        if value is None:
            raise ValueError(f"{self.path}: {name} is missing")
        return value

    def only(self, name: str, allowed: Any, default: Any = None) -> None:
        """Raise ValueError unless the value (`default` where it is missing) is `allowed`."""
        value = self.get(name, default)
        if value != allowed:
            raise ValueError(
                f"{self.path}: {name} is {value!r}, which our models cannot be: only {allowed!r}"
            )

    def rope(self) -> dict[str, Any]:
        """Rotary positions: rope_parameters, or rope_theta and rope_scaling of older files."""
        found = self.get("rope_parameters")
        if found is None:
            found = {"rope_theta": self.get("rope_theta", 10000.0), **self.get("rope_scaling", {})}
        found = {"rope_theta": 10000.0, **found}
        found["rope_type"] = found.pop("type", None) or found.get("rope_type") or "default"
        if self.get("partial_rotary_factor", found.get("partial_rotary_factor", 1.0)) != 1.0:
            raise ValueError(f"{self.path}: partial_rotary_factor is not 1: not supported")
        return found


def _number(value: float) -> int | float:
    return int(value) if float(value).is_integer() else float(value)


def _shape_flags(config: HuggingFaceConfig) -> Flags:
    """What all but GPT-2 share."""
    config.only("hidden_act", "silu", "silu")
    config.only("attention_bias", False, False)
    config.only("mlp_bias", False, False)
    flags: Flags = {
        "--num-layers": config.need("num_hidden_layers"),
        "--hidden-size": config.need("hidden_size"),
        "--ffn-hidden-size": config.need("intermediate_size"),
        "--num-attention-heads": config.need("num_attention_heads"),
        "--max-position-embeddings": config.need("max_position_embeddings"),
        "--vocab-size": config.need("vocab_size"),
        "--norm-epsilon": config.get("rms_norm_eps", 1e-6),
        "--position-embedding-type": "rope",
        "--rotary-base": _number(config.rope()["rope_theta"]),
        "--normalization": "RMSNorm",
        "--swiglu": True,
        "--disable-bias-linear": True,
        "--attention-dropout": 0.0,
        "--hidden-dropout": 0.0,
        "--init-method-std": config.get("initializer_range", 0.02),
    }
    if not config.get("tie_word_embeddings", False):
        flags["--untie-embeddings-and-output-weights"] = True
    return flags


def grouped_flags(config: HuggingFaceConfig) -> Flags:
    """Attention with query groups and plain or Llama 3.1's rotary positions."""
    if config.get("sliding_window") is not None and config.get("use_sliding_window", True):
        raise ValueError(f"{config.path}: sliding_window is {config.get('sliding_window')}: not supported")
    heads = config.need("num_attention_heads")
    groups = config.get("num_key_value_heads", heads)
    flags = _shape_flags(config)
    flags["--kv-channels"] = config.get("head_dim", config.need("hidden_size") // heads)
    if groups != heads:
        flags |= {"--group-query-attention": True, "--num-query-groups": groups}
    rope = config.rope()
    if rope["rope_type"] == "linear":
        flags["--rotary-seq-len-interpolation-factor"] = _number(rope["factor"])
    elif rope["rope_type"] == "llama3":
        for name, value in LLAMA3.items():
            if rope.get(name) != value:
                raise ValueError(
                    f"{config.path}: llama3 rope with {name} {rope.get(name)}: only {value} is supported"
                )
        flags |= {"--use-rope-scaling": True, "--rope-scaling-factor": rope["factor"]}
    elif rope["rope_type"] != "default":
        raise ValueError(f"{config.path}: rope_type {rope['rope_type']!r} is not supported for this family")
    return flags


def qwen3_flags(config: HuggingFaceConfig) -> Flags:
    flags = {**grouped_flags(config), "--qk-layernorm": True}
    flags["--kv-channels"] = config.get("head_dim", 128)
    return flags


def _expert_flags(experts: int, config: HuggingFaceConfig) -> Flags:
    return {
        "--num-experts": experts,
        "--moe-router-topk": config.need("num_experts_per_tok"),
        "--moe-token-dispatcher-type": "alltoall",
        "--moe-router-dtype": "fp32",
    }


def mixtral_flags(config: HuggingFaceConfig) -> Flags:
    return {**grouped_flags(config), **_expert_flags(config.need("num_local_experts"), config)}


def qwen3_moe_flags(config: HuggingFaceConfig) -> Flags:
    experts = config.get("num_experts") or config.need("num_local_experts")
    flags = {**qwen3_flags(config), **_expert_flags(experts, config)}
    flags["--moe-ffn-hidden-size"] = config.need("moe_intermediate_size")
    if not config.get("norm_topk_prob", False):
        flags["--moe-router-pre-softmax"] = True
    dense, step = config.get("mlp_only_layers", []), config.get("decoder_sparse_step", 1)
    layers = range(config.need("num_hidden_layers"))
    pattern = [int(layer not in dense and (layer + 1) % step == 0) for layer in layers]
    if not all(pattern):
        flags["--moe-layer-freq"] = f"({pattern})"
    return flags


def deepseek_flags(config: HuggingFaceConfig) -> Flags:
    config.only("scoring_func", "sigmoid", "sigmoid")
    config.only("topk_method", "noaux_tc", "noaux_tc")
    config.only("moe_layer_freq", 1, 1)
    config.only("rope_interleave", True, True)
    if config.need("num_experts_per_tok") > 1:
        config.only("norm_topk_prob", True, True)
    layers, dense = config.need("num_hidden_layers"), config.get("first_k_dense_replace", 0)
    inner, shared = config.need("moe_intermediate_size"), config.get("n_shared_experts", 0)
    flags: Flags = {
        **_shape_flags(config),
        **_expert_flags(config.need("n_routed_experts"), config),
        "--multi-latent-attention": True,
        "--qk-layernorm": True,
        "--kv-lora-rank": config.need("kv_lora_rank"),
        "--qk-head-dim": config.need("qk_nope_head_dim"),
        "--qk-pos-emb-head-dim": config.need("qk_rope_head_dim"),
        "--v-head-dim": config.need("v_head_dim"),
        "--moe-ffn-hidden-size": inner,
        "--moe-router-score-function": "sigmoid",
        "--moe-router-enable-expert-bias": True,
        "--moe-router-topk-scaling-factor": config.get("routed_scaling_factor", 1.0),
    }
    if config.need("hidden_size") % config.need("num_attention_heads"):
        flags["--kv-channels"] = config.need("v_head_dim")
    if config.get("q_lora_rank") is not None:
        flags["--q-lora-rank"] = config.get("q_lora_rank")
    if dense:
        flags["--moe-layer-freq"] = f"([0]*{dense}+[1]*{layers - dense})"
    if shared:
        flags["--moe-shared-expert-intermediate-size"] = shared * inner
    if config.predictions:
        flags["--mtp-num-layers"] = config.predictions
    return {**flags, **_group_flags(config), **_yarn_flags(config)}


def _group_flags(config: HuggingFaceConfig) -> Flags:
    """Group-limited routing: theirs scores a group by its two best experts."""
    groups, chosen, topk = (
        config.get("n_group", 1),
        config.get("topk_group", 1),
        config.need("num_experts_per_tok"),
    )
    if groups == 1:
        return {}
    if topk != 2 * chosen:
        raise ValueError(
            f"{config.path}: num_experts_per_tok {topk} is not twice topk_group {chosen}: groups would be scored "
            "by another number of experts than two; not supported"
        )
    return {"--moe-router-num-groups": groups, "--moe-router-group-topk": chosen}


def _yarn_flags(config: HuggingFaceConfig) -> Flags:
    rope = config.rope()
    if rope["rope_type"] == "default":
        return {"--rope-type": "rope"}
    if rope["rope_type"] != "yarn" or rope.get("attention_factor") is not None:
        raise ValueError(
            f"{config.path}: rope_type {rope['rope_type']!r} (or attention_factor) is not supported"
        )
    flags: Flags = {
        "--rope-type": "yarn",
        "--rotary-scaling-factor": float(rope["factor"]),
        "--yarn-original-max-position-embeddings": rope["original_max_position_embeddings"],
        "--yarn-beta-fast": float(rope.get("beta_fast") or 32.0),
        "--yarn-beta-slow": float(rope.get("beta_slow") or 1.0),
        "--mscale": float(rope.get("mscale") or 1.0),
        "--mscale-all-dim": float(rope.get("mscale_all_dim") or 0.0),
    }
    if not rope.get("truncate", True):
        flags["--no-yarn-correction-range-round-to-int"] = True
    return flags


def gpt2_flags(config: HuggingFaceConfig) -> Flags:
    config.only("activation_function", "gelu", "gelu_new")
    config.only("scale_attn_weights", True, True)
    config.only("scale_attn_by_inverse_layer_idx", False, False)
    config.only("tie_word_embeddings", True, True)
    return {
        "--num-layers": config.need("n_layer"),
        "--hidden-size": config.need("n_embd"),
        "--ffn-hidden-size": config.get("n_inner", 4 * config.need("n_embd")),
        "--num-attention-heads": config.need("n_head"),
        "--max-position-embeddings": config.need("n_positions"),
        "--vocab-size": config.need("vocab_size"),
        "--norm-epsilon": config.get("layer_norm_epsilon", 1e-5),
        "--attention-dropout": config.get("attn_pdrop", 0.1),
        "--hidden-dropout": config.get("resid_pdrop", 0.1),
        "--init-method-std": config.get("initializer_range", 0.02),
    }
