"""Tiny Hugging Face folders for the conversion tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.tools.convert.safetensors_file import (
    Described,
    FolderWriter,
    index_json,
    plan_files,
    read_folder,
    read_tensor,
)

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "attn_implementation": "eager",
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "intermediate_size": 40,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED: dict[str, Any] = {**SHAPE, "num_key_value_heads": 2}
DEEPSEEK: dict[str, Any] = {
    **SHAPE,
    "moe_intermediate_size": 12,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 12,
    "v_head_dim": 6,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
}


def build(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random transformers model of `family`, on CPU."""
    import transformers as t

    table = {
        "llama": (t.LlamaConfig, t.LlamaForCausalLM, GROUPED),
        "llama_tied": (t.LlamaConfig, t.LlamaForCausalLM, {**SHAPE, "tie_word_embeddings": True}),
        "qwen3": (t.Qwen3Config, t.Qwen3ForCausalLM, {**GROUPED, "head_dim": 12}),
        "mixtral": (t.MixtralConfig, t.MixtralForCausalLM, {**GROUPED, "num_local_experts": 4}),
        "qwen3_moe": (
            t.Qwen3MoeConfig,
            t.Qwen3MoeForCausalLM,
            {
                **GROUPED,
                "head_dim": 12,
                "moe_intermediate_size": 12,
                "num_experts": 8,
                "num_experts_per_tok": 3,
                "mlp_only_layers": [0],
            },
        ),
        "deepseek_v3": (t.DeepseekV3Config, t.DeepseekV3ForCausalLM, DEEPSEEK),
    }
    make_config, make_model, values = table[family]
    torch.manual_seed(6)
    model = make_model(make_config(**{**values, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter) * 0.2
            parameter.copy_(1 + noise if parameter.dim() == 1 else noise)
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.normal_(0.0, 0.1)
    return model.to(dtype).eval()


def save(model: Any, folder: Path, max_shard_size: str = "5GB") -> Path:
    """Write the model as transformers does."""
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def rewrite(source: Path, target: Path, tensors: dict[str, Tensor], max_bytes: int = 10**9) -> Path:
    """`source` with `tensors` added or replaced, in the way of published models (transformers leaves out
    prediction layers).
    """
    everything = {name: read_tensor(info) for name, info in read_folder(source).items()} | tensors
    described = {name: Described(tuple(item.shape), item.dtype) for name, item in everything.items()}
    files = plan_files(described, max_bytes)
    target.mkdir()
    writer = FolderWriter(target, described, files)
    for name, tensor in everything.items():
        writer.write(name, tensor)
    writer.close()
    if len(set(files.values())) > 1:
        (target / "model.safetensors.index.json").write_text(index_json(described, files))
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    return target


def change_config(folder: Path, **changes: Any) -> None:
    """Edit config.json; None takes a key away."""
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))


def with_prediction_layer(folder: Path, target: Path, deeper: Any) -> Path:
    """A DeepSeek-V3 folder whose prediction layer has the weights of the last layer of `deeper`, one layer longer."""
    layer = deeper.config.num_hidden_layers - 1
    own = {name: read_tensor(info) for name, info in read_folder(folder).items()}
    saved = save(deeper, target.with_name("deeper"))
    prefix = f"model.layers.{layer}."
    tensors = {
        name: read_tensor(info) for name, info in read_folder(saved).items() if name.startswith(prefix)
    }
    hidden = deeper.config.hidden_size
    generator = torch.Generator().manual_seed(2)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{prefix}{name}.weight"] = 1 + 0.2 * torch.randn(hidden, generator=generator)
    tensors[f"{prefix}eh_proj.weight"] = 0.2 * torch.randn(hidden, 2 * hidden, generator=generator)
    tensors[f"{prefix}embed_tokens.weight"] = own["model.embed_tokens.weight"]
    tensors[f"{prefix}shared_head.head.weight"] = own["lm_head.weight"]
    return rewrite(folder, target, tensors, max_bytes=40_000)
