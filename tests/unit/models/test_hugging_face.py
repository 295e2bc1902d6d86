"""Independent witnesses: random Hugging Face models with their weights moved into ours give the same numbers."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from megatron.models.config import RotaryConfig
from tests.unit.models.helpers import build_gpt, converted, random_batch, relative_error, tiny_config

LLAMA_SHAPE = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "attn_implementation": "eager",
}
OURS_LLAMA = {
    "hidden_size": 48,
    "ffn_hidden_size": 80,
    "num_layers": 3,
    "num_attention_heads": 6,
    "num_query_groups": 2,
    "max_position_embeddings": 64,
    "layernorm_epsilon": 1e-6,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "activation": "silu",
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}


def llama():
    config = LlamaConfig(**LLAMA_SHAPE, rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    return LlamaForCausalLM(config), tiny_config(**OURS_LLAMA, rotary=RotaryConfig(base=500.0))


def llama3():
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(**{**LLAMA_SHAPE, "attention_bias": False}, rope_parameters=rope)
    return LlamaForCausalLM(config), tiny_config(
        **OURS_LLAMA, rotary=RotaryConfig(base=500000.0, scaling_factor=8.0)
    )


def qwen3():
    config = Qwen3Config(
        **LLAMA_SHAPE,
        head_dim=12,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
    )
    ours = {**OURS_LLAMA, "kv_channels": 12, "untie_embeddings_and_output_weights": False}
    return Qwen3ForCausalLM(config), tiny_config(**ours, qk_layernorm=True, rotary=RotaryConfig(base=1000.0))


def gpt2():
    config = GPT2Config(
        n_embd=48,
        n_head=6,
        n_layer=3,
        n_positions=64,
        vocab_size=61,
        activation_function="gelu",
        attn_implementation="eager",
    )
    return GPT2LMHeadModel(config), tiny_config(
        hidden_size=48, num_attention_heads=6, num_layers=3, max_position_embeddings=64
    )


@pytest.mark.parametrize("make", [llama, llama3, qwen3, gpt2])
@pytest.mark.filterwarnings("ignore")
def test_equals_hugging_face(make, tmp_path):
    """Logits and the gradient of every input embedding; rotary positions, groups, gates, q/k norm by witnesses."""
    torch.manual_seed(4)
    theirs, config = make()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            noise = torch.randn_like(parameter) * 0.2
            is_gain = parameter.dim() == 1 and name.endswith("weight")
            parameter.copy_(1 + noise if is_gain else noise)
    theirs.eval()
    model = build_gpt(config)
    model.load_state_dict(converted(theirs, config, tmp_path))

    tokens, labels = random_batch(config, length=40)
    inputs = theirs.get_input_embeddings()(tokens).detach().requires_grad_()
    their_logits = theirs(inputs_embeds=inputs).logits
    torch.nn.functional.cross_entropy(their_logits.flatten(0, 1), labels.flatten()).backward()

    found = []
    model.embedding.word_embeddings.register_forward_hook(lambda module, args, out: found.append(out))
    losses = model(tokens, labels=labels)
    found[0].retain_grad()
    losses.mean().backward()
    assert relative_error(found[0].grad.transpose(0, 1), inputs.grad) < 1e-5
    assert relative_error(model(tokens), their_logits) < 1e-5
    reference = torch.nn.functional.cross_entropy(their_logits.transpose(1, 2), labels, reduction="none")
    assert relative_error(losses, reference) < 1e-5
