"""Formulas against counts: O03."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron.models.backends.base import LayerOptions
from megatron.models.backends.torch import TorchBackend
from megatron.models.deepseek import MTPConfig
from megatron.models.flops import count_parameters, forward_flops, training_flops
from megatron.models.gpt import GPTModel
from megatron.models.variants import Variants
from megatron.parallel.mesh import ParallelMesh
from tests.unit.models.helpers import build_gpt, random_batch, tiny_config
from tests.unit.models.moe import shapes

SHAPES = {
    "gpt2": {},
    "grouped-gated": {
        "hidden_size": 48,
        "num_attention_heads": 6,
        "num_query_groups": 2,
        "kv_channels": 16,
        "activation": "silu",
        "gated_linear_unit": True,
        "ffn_hidden_size": 72,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "untie_embeddings_and_output_weights": True,
        "qk_layernorm": True,
    },
    "qkv-bias": {"add_bias_linear": False, "add_qkv_bias": True, "num_query_groups": 1, "qk_layernorm": True},
    "variants": {
        "num_query_groups": 2,
        "variants": Variants(softmax_type="learnable", output_gate=True, residual_post_layernorm=True),
    },
    "gated-bias": {"gated_linear_unit": True, "num_layers": 3},
}
EXPERTS = {
    "mixtral": shapes.mixtral(),
    "deepseek": shapes.deepseek(),
    "repeated-prediction": shapes.deepseek().replace(mtp=MTPConfig(2, use_repeated_layer=True)),
    "shared-gate": shapes.mixtral(shared_expert_intermediate_size=12, shared_expert_gate=True),
}


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("padded", [None, 64])
def test_parameter_count_is_that_of_the_built_model(changes, padded):
    config = tiny_config(**changes, padded_vocab_size=padded)
    mesh = ParallelMesh.single()
    model = GPTModel(config, TorchBackend(LayerOptions(device="meta")), mesh)
    count = sum(parameter.numel() for parameter in model.parameters())
    tables = 2 if config.untie_embeddings_and_output_weights else 1
    count -= tables * (config.padded_vocab_size - config.vocab_size) * config.hidden_size
    assert count_parameters(config).total == count == count_parameters(config).active
    embedding = sum(
        p.numel() for n, p in model.named_parameters() if n.startswith(("embedding", "output_layer"))
    )
    embedding -= tables * (config.padded_vocab_size - config.vocab_size) * config.hidden_size
    assert count_parameters(config).embedding == embedding


@pytest.mark.parametrize("config", EXPERTS.values(), ids=EXPERTS.keys())
def test_parameters_of_models_with_experts(config):
    """All of them, and those that one token meets: topk of the experts."""
    model = GPTModel(config, TorchBackend(LayerOptions(device="meta")), ParallelMesh.single())
    padding = 2 * (config.padded_vocab_size - config.vocab_size) * config.hidden_size
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    total = sum(parameter.numel() for parameter in model.parameters()) - padding
    found = count_parameters(config)
    assert found.total == total
    assert found.active == total - experts + experts * config.moe.topk // config.moe.num_experts


def counted_flops(run) -> float:
    counter = FlopCounterMode(display=False)
    # torch does not count the CPU's flash kernel; the math one is plain matrix products
    with sdpa_kernel(SDPBackend.MATH), counter:
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())
def test_flops_equal_torch_s_counter(changes):
    """Within 1 %: linear layers, attention, head; forward, and backward with both of its multiplications."""
    config = tiny_config(**changes, vocab_size=64)
    model = build_gpt(config)
    tokens, labels = random_batch(config, batch=2, length=16)
    mask = torch.ones(16, 16, dtype=torch.bool).triu(1)[None, None]
    forward = counted_flops(lambda: model(tokens, attention_mask=mask, labels=labels))
    assert abs(2 * forward_flops(config, 16, causal=False) / forward - 1) < 0.01
    both = counted_flops(lambda: model(tokens, attention_mask=mask, labels=labels).sum().backward())
    assert abs(2 * training_flops(config, 16, causal=False) / both - 1) < 0.01


@pytest.mark.parametrize("name", EXPERTS)
def test_flops_of_models_with_experts(name):
    """Within 1 %; heads of values as wide as those of queries, which the math kernel makes them."""
    config = EXPERTS[name].replace(vocab_size=64)
    if config.mla is not None:
        config = config.replace(mla=dataclasses.replace(config.mla, v_head_dim=config.mla.query_head_dim))
    model = build_gpt(config)
    tokens, labels = random_batch(config, batch=2, length=16)
    mask = torch.ones(16, 16, dtype=torch.bool).triu(1)[None, None]
    both = counted_flops(lambda: model(tokens, attention_mask=mask, labels=labels).sum().backward())
    assert abs(2 * training_flops(config, 16, causal=False) / both - 1) < 0.01


def test_causal_attention_counts_half_of_the_pairs():
    config = tiny_config()
    full, half = forward_flops(config, 512, causal=False), forward_flops(config, 512)
    linear = forward_flops(config, 512, causal=False) - 2 * 2 * 2 * 512 * 512 * 32
    assert full - half == pytest.approx((full - linear) / 2)


@pytest.mark.parametrize(
    ("preset", "billions"),
    [
        ("gpt-345m", 0.355),
        ("llama2-7b", 6.738),
        ("llama2-70b", 68.977),
        ("llama3.1-8b", 8.030),
        ("mixtral-8x7b", 46.703),
        ("mixtral-8x22b", 140.621),
        ("qwen3-30b-a3b", 30.532),
        ("qwen3-235b-a22b", 235.094),
        ("moonlight-16b", 15.960),
    ],
)
def test_published_sizes(preset, billions):
    """Parameter counts that the papers and model cards state."""
    from tests.unit.models.test_presets import config_of

    assert count_parameters(config_of(preset)).total / 1e9 == pytest.approx(billions, abs=0.0007)


def test_deepseek_v3_is_671_billion():
    """The published total of the model itself and its 37 billion active ones; its further layer comes on top."""
    from tests.unit.models.test_presets import config_of

    config = config_of("deepseek-v3-671b")
    assert config.mtp is not None and config.mtp.num_layers == 1
    found = count_parameters(config.replace(mtp=None))
    assert found.total / 1e9 == pytest.approx(671.026, abs=0.001)
    assert found.active / 1e9 == pytest.approx(37.5, abs=0.1)
    assert (count_parameters(config).total - found.total) / 1e9 == pytest.approx(11.6, abs=0.1)
