"""Tiny models with experts, and moving tensors between one rank and a layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron.models.config import ModelConfig, RotaryConfig
from megatron.models.deepseek import MLAConfig, MTPConfig, YarnConfig
from megatron.models.moe.config import MoEConfig
from megatron.models.moe.experts import global_names
from megatron.parallel.annotate import annotation_of, global_shape, local_chunks
from megatron.parallel.mesh import ParallelMesh

VOCABULARY = 61
SHAPE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "padded_vocab_size": 64,
    "max_position_embeddings": 32,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "init_method_std": 0.2,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "activation": "silu",
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
BALANCED = {
    "load_balancing": ("aux_loss", "seq_aux_loss"),
    "aux_loss_coeff": (0.1, 0.2),
    "z_loss_coeff": 0.05,
}


def mixtral(**changes: Any) -> ModelConfig:
    """Softmax of the chosen, every layer with experts."""
    moe = {"num_experts": 4, "ffn_hidden_size": 24, "pattern": (True, True), "topk": 2, **BALANCED, **changes}
    return ModelConfig(**SHAPE, num_query_groups=2, moe=MoEConfig(**moe))


def deepseek(**changes: Any) -> ModelConfig:
    """Latent attention with YaRN, a dense layer first, groups, bias, shared expert, two further tokens."""
    moe = {
        "num_experts": 8,
        "ffn_hidden_size": 8,
        "pattern": (False, True),
        "topk": 4,
        "num_groups": 4,
        "group_topk": 2,
        "score_function": "sigmoid",
        "enable_expert_bias": True,
        "bias_update_rate": 0.01,
        "topk_scaling_factor": 2.5,
        "router_dtype": "fp32",
        "shared_expert_intermediate_size": 16,
        "load_balancing": ("seq_aux_loss", "global_aux_loss"),
        "aux_loss_coeff": (0.1, 0.1),
        **changes,
    }
    return ModelConfig(
        **SHAPE,
        qk_layernorm=True,
        rotary=RotaryConfig(yarn=YarnConfig(4.0, 8, mscale=1.0, mscale_all_dim=0.7)),
        mla=MLAConfig(q_lora_rank=12, kv_lora_rank=8, qk_head_dim=6, qk_pos_emb_head_dim=4, v_head_dim=5),
        mtp=MTPConfig(2, 0.3),
        moe=MoEConfig(**moe),
    )


def pieces(
    model: nn.Module, config: ModelConfig, mesh: ParallelMesh
) -> list[tuple[str, Any, tuple[int, ...], list[Any]]]:
    """(global name, parameter, global shape, chunks) of every parameter of this rank."""
    name_of = global_names(mesh, None if config.moe is None else config.moe.num_experts)
    found = []
    for name, parameter in model.named_parameters():
        annotation = annotation_of(parameter)
        rank, size = mesh.rank(annotation.tensor_axis), mesh.size(annotation.tensor_axis)
        shape = global_shape(annotation, parameter.shape, size)
        chunks = local_chunks(annotation, parameter.shape, rank, size)
        found.append((name_of(name, parameter), parameter, shape, chunks))
    return found


def load_whole(model: Any, state: dict[str, Tensor], mesh: ParallelMesh) -> None:
    """Fill this rank's parameters and buffers from tensors of the whole model."""
    with torch.no_grad():
        for name, parameter, shape, chunks in pieces(model, model.config, mesh):
            whole = state[name]
            assert tuple(whole.shape) == tuple(shape), f"{name}: {tuple(whole.shape)} for {tuple(shape)}"
            for chunk in chunks:
                there = tuple(slice(o, o + n) for o, n in zip(chunk.global_offsets, chunk.sizes, strict=True))
                here = tuple(slice(o, o + n) for o, n in zip(chunk.local_offsets, chunk.sizes, strict=True))
                parameter[here] = whole[there]
        for name, buffer in model.named_buffers():
            buffer.copy_(state[name])
