"""The families of Hugging Face models that we know: config.json <-> Megatron's flags, and their weights' names.

A family says which flags a config.json means and which config.json a model of ours has; before anything is exported,
megatron/tools/convert/records.py checks that one undoes the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.models.config import ModelConfig
from megatron.tools.convert import read_config as read
from megatron.tools.convert import write_config as write
from megatron.tools.convert.mapping import WeightMap
from megatron.tools.convert.names import decoder_weights, gpt2_weights, mixtral_weights
from megatron.tools.convert.read_config import Flags, HuggingFaceConfig


@dataclass(frozen=True)
class Family:
    """model_type, architecture: of config.json."""

    model_type: str
    architecture: str
    flags: Callable[[HuggingFaceConfig], Flags]
    config: Callable[[ModelConfig], dict[str, Any]]
    weights: Callable[[ModelConfig], WeightMap]


def family_of(config: HuggingFaceConfig) -> Family:
    """The family of a config.json. Raises ValueError with the known ones."""
    model_type = config.need("model_type")
    if model_type not in FAMILIES:
        raise ValueError(
            f"{config.path}: model_type {model_type!r} is unknown: only {', '.join(sorted(FAMILIES))} can be converted"
        )
    if config.get("quantization_config") is not None:
        raise ValueError(
            f"{config.path}: the weights are quantized (quantization_config): give the bf16 ones"
        )
    return FAMILIES[model_type]


def family_for(config: ModelConfig) -> Family:
    """The family that a model of ours belongs to, by its parts."""
    if config.mla is not None:
        return FAMILIES["deepseek_v3"]
    if config.position_embedding_type == "learned_absolute":
        return FAMILIES["gpt2"]
    if config.moe is not None:
        return FAMILIES["qwen3_moe" if config.qk_layernorm else "mixtral"]
    return FAMILIES["qwen3" if config.qk_layernorm else "llama"]


FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family("llama", "LlamaForCausalLM", read.grouped_flags, write.grouped_config, decoder_weights),
        Family("qwen3", "Qwen3ForCausalLM", read.qwen3_flags, write.grouped_config, decoder_weights),
        Family("mixtral", "MixtralForCausalLM", read.mixtral_flags, write.mixtral_config, mixtral_weights),
        Family(
            "qwen3_moe", "Qwen3MoeForCausalLM", read.qwen3_moe_flags, write.qwen3_moe_config, decoder_weights
        ),
        Family(
            "deepseek_v3",
            "DeepseekV3ForCausalLM",
            read.deepseek_flags,
            write.deepseek_config,
            decoder_weights,
        ),
        Family("gpt2", "GPT2LMHeadModel", read.gpt2_flags, write.gpt2_config, gpt2_weights),
    )
}
