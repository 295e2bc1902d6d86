"""Independent witnesses: random Hugging Face models give our logits and input gradients, EP and TP 1, 2.

For RoPE pairs, latent attention, YaRN, routing, groups, gates and shared experts.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.models.backends.base import LayerOptions
from megatron.models.backends.torch import TorchBackend
from megatron.models.config import ModelConfig, RotaryConfig
from megatron.models.deepseek import MLAConfig, YarnConfig
from megatron.models.gpt import GPTModel
from megatron.models.init import Initializer, materialise
from megatron.models.moe.config import MoEConfig
from megatron.parallel.mesh import ParallelMesh, ParallelSizes
from tests.pool import run_ranks
from tests.unit.models.helpers import converted, random_batch, relative_error
from tests.unit.models.moe.shapes import load_whole

LENGTH = 20
THEIRS: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 62,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "attn_implementation": "eager",
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
OURS: dict[str, Any] = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 62,
    "max_position_embeddings": 64,
    "layernorm_epsilon": 1e-6,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "activation": "silu",
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    theirs = MixtralForCausalLM(
        MixtralConfig(**THEIRS, intermediate_size=24, num_key_value_heads=2, num_local_experts=4)
    )
    moe = MoEConfig(4, 24, (True, True), topk=2, dispatcher="alltoall")
    rotary = RotaryConfig(base=500.0)
    return theirs, ModelConfig(**OURS, ffn_hidden_size=24, num_query_groups=2, rotary=rotary, moe=moe)


def qwen3_moe():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    theirs = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **THEIRS,
            intermediate_size=40,
            moe_intermediate_size=12,
            num_key_value_heads=2,
            head_dim=12,
            num_experts=8,
            num_experts_per_tok=3,
            norm_topk_prob=False,
            mlp_only_layers=[0],
        )
    )
    moe = MoEConfig(8, 12, (False, True), topk=3, pre_softmax=True, dispatcher="alltoall")
    ours = {**OURS, "ffn_hidden_size": 40, "num_query_groups": 2, "kv_channels": 12, "qk_layernorm": True}
    return theirs, ModelConfig(**ours, rotary=RotaryConfig(base=500.0), moe=moe)


def deepseek_v3():
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    rope = {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 8.0,
        "beta_slow": 0.5,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    }
    theirs = DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **{**THEIRS, "rope_parameters": rope, "max_position_embeddings": 64},
            intermediate_size=40,
            moe_intermediate_size=12,
            num_key_value_heads=4,
            n_routed_experts=8,
            n_shared_experts=2,
            num_experts_per_tok=4,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
            norm_topk_prob=True,
            first_k_dense_replace=1,
            q_lora_rank=12,
            kv_lora_rank=16,
            qk_nope_head_dim=8,
            qk_rope_head_dim=12,
            v_head_dim=6,
        )
    )
    moe = MoEConfig(
        8,
        12,
        (False, True),
        topk=4,
        num_groups=4,
        group_topk=2,
        score_function="sigmoid",
        enable_expert_bias=True,
        topk_scaling_factor=2.5,
        shared_expert_intermediate_size=24,
        dispatcher="alltoall",
    )
    yarn = YarnConfig(4.0, 16, 8.0, 0.5, mscale=1.0, mscale_all_dim=0.7)
    mla = MLAConfig(q_lora_rank=12, kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=12, v_head_dim=6)
    rotary = RotaryConfig(base=500.0, yarn=yarn)
    config = ModelConfig(**OURS, ffn_hidden_size=40, qk_layernorm=True, rotary=rotary, moe=moe, mla=mla)
    return theirs, config


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    theirs = LlamaForCausalLM(LlamaConfig(**THEIRS, intermediate_size=40, num_key_value_heads=2))
    rotary = RotaryConfig(base=500.0)
    return theirs, ModelConfig(**OURS, ffn_hidden_size=40, num_query_groups=2, rotary=rotary)


def qwen3():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    theirs = Qwen3ForCausalLM(
        Qwen3Config(
            **THEIRS, intermediate_size=40, num_key_value_heads=2, head_dim=12, tie_word_embeddings=False
        )
    )
    ours = {**OURS, "ffn_hidden_size": 40, "num_query_groups": 2, "kv_channels": 12, "qk_layernorm": True}
    return theirs, ModelConfig(**ours, rotary=RotaryConfig(base=500.0))


MODELS = {
    "llama": llama,
    "qwen3": qwen3,
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
    "deepseek_v3": deepseek_v3,
}


@functools.cache
def witness(name: str) -> tuple[dict[str, Tensor], ModelConfig, Tensor, Tensor]:
    """(weights by our names, config, logits, gradient of the input embeddings)."""
    torch.manual_seed(4)
    theirs, config = MODELS[name]()
    with torch.no_grad():
        for parameter in theirs.parameters():
            noise = torch.randn_like(parameter) * 0.2
            parameter.copy_(1 + noise if parameter.dim() == 1 else noise)
        for buffer_name, buffer in theirs.named_buffers():
            if "correction_bias" in buffer_name:
                buffer.normal_(0.0, 0.1)
    theirs.eval()
    tokens, labels = random_batch(config, length=LENGTH)
    inputs = theirs.get_input_embeddings()(tokens).detach().requires_grad_()
    logits = theirs(inputs_embeds=inputs).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    with tempfile.TemporaryDirectory() as folder:
        state = converted(theirs, config, Path(folder))
    return state, config, logits.detach(), inputs.grad


def run_rank(rank, world_size, state, config, sizes, sequence_parallel):
    """Logits of this rank's columns and the gradient of the embeddings."""
    mesh = ParallelMesh(ParallelSizes(**sizes)) if sizes else ParallelMesh.single()
    options = LayerOptions.from_mesh(mesh, sequence_parallel=sequence_parallel, device="meta")
    model = materialise(GPTModel(config, TorchBackend(options), mesh), Initializer(1, mesh))
    load_whole(model, state, mesh)
    model.eval()
    tokens, labels = random_batch(config, length=LENGTH)
    found: list[Tensor] = []
    model.embedding.word_embeddings.register_forward_hook(lambda module, args, out: found.append(out))
    losses = model(tokens, labels=labels)
    found[0].retain_grad()
    losses.mean().backward()
    grad = found[0].grad
    if sequence_parallel:
        whole = [torch.empty_like(grad) for _ in range(mesh.size("tp"))]
        dist.all_gather(whole, grad.contiguous(), group=mesh.group("tp"))
        grad = torch.cat(whole)
    with torch.no_grad():
        return model(tokens), grad.transpose(0, 1)


LAYOUTS = {
    "ep1": ({}, False),
    "ep2": ({"data": 2, "expert": 2}, False),
    "tp2-etp2": ({"tensor": 2, "expert_tensor": 2}, False),
    "tp2-sp-ep2": ({"tensor": 2, "expert": 2}, True),
}


def run_layouts(rank, world_size, state, config):
    """Each layout of two ranks."""
    return [run_rank(rank, world_size, state, config, *layout) for layout in LAYOUTS.values() if layout[0]]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore")
def test_equals_hugging_face(name):
    state, config, logits, grad = witness(name)
    single = [[run_rank(0, 1, state, config, *LAYOUTS["ep1"])]]
    layouts = single + list(zip(*run_ranks(run_layouts, 2, state, config, timeout=120), strict=True))
    for (layout, (sizes, _)), results in zip(LAYOUTS.items(), layouts, strict=True):
        columns = [item[0] for item in results] if "tensor" in sizes else [results[0][0]]
        assert relative_error(torch.cat(columns, dim=-1), logits) < 1e-5, layout
        for _, ours in results:
            assert relative_error(ours, grad) < 1e-5, layout
