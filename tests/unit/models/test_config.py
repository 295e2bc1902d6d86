"""Configs: derived values as in Megatron, refusals that name the flag, the value and the fix (O06)."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from megatron.models.config import ModelConfig, RecomputeConfig, RotaryConfig
from megatron.models.init import InitSpec
from tests.unit.models.helpers import tiny_config

NEEDED = {
    "num_layers": 2,
    "hidden_size": 96,
    "num_attention_heads": 4,
    "vocab_size": 50,
    "max_position_embeddings": 16,
}


def from_flags(**values) -> ModelConfig:
    return ModelConfig.from_arguments(SimpleNamespace(**{**NEEDED, **values}))


def test_derived_values():
    config = tiny_config(hidden_size=96)
    assert config.ffn_hidden_size == 384 and config.kv_channels == 24 and config.num_query_groups == 4
    assert config.padded_vocab_size == 61 and config.embedding_init_method_std == 0.02
    # Megatron: int(4 h * 2 / 3 / 64) * 64
    assert from_flags(hidden_size=4096, num_attention_heads=32, swiglu=True).ffn_hidden_size == 10880
    assert from_flags(hidden_size=4096, num_attention_heads=32).ffn_hidden_size == 16384
    config = tiny_config(num_layers=8)
    assert config.linear_init(32, 96) == InitSpec("normal", 0.02)
    assert config.linear_init(32, 32, writes_residual=True) == InitSpec("normal", 0.005)


def test_flags_become_fields():
    config = from_flags(
        swiglu=True,
        group_query_attention=True,
        num_query_groups=2,
        use_rotary_position_embeddings=True,
        rotary_base=500000,
        use_rope_scaling=True,
        rope_scaling_factor=32.0,
        add_bias_linear=False,
        recompute_granularity="full",
        recompute_method="block",
        recompute_num_layers=3,
        cp_comm_type=["a2a"],
        kv_channels=None,
    )
    assert (config.activation, config.gated_linear_unit, config.num_query_groups) == ("silu", True, 2)
    assert config.position_embedding_type == "rope" and not config.qkv_bias
    assert config.rotary == RotaryConfig(base=500000, scaling_factor=32.0)
    assert config.recompute == RecomputeConfig("full", "block", 3)
    assert config.cp_comm_type == ("a2a",)


def test_flags_of_variants():
    variants = from_flags(
        num_layers=4,
        window_size=(8, 0),
        window_attn_skip_freq=2,
        no_rope_freq=[0, 0, 1, 0],
        softmax_type="learnable",
    ).variants
    assert [variants.window_of(number) for number in range(1, 6)] == [(8, 0), None, (8, 0), None, None]
    assert [variants.has_rope(number) for number in range(1, 5)] == [True, True, False, True]
    assert variants.attention_options(1) == {"window_size": (8, 0), "softmax_type": "learnable"}
    assert from_flags(openai_gelu=True).activation == "gelu_tanh"
    assert from_flags(window_attn_skip_freq=2).variants.attention_options(1) == {}
    mup = {"use_mup": True, "mup_output_mult": 2.0, "hidden_size": 96}
    config = from_flags(**mup, mup_base_hidden_size=24, mup_base_head_dim=6)
    assert config.variants.mup.logit_mult == 0.5
    assert config.linear_init(96, 96) == InitSpec("normal", 0.01)
    assert config.attention_scale == pytest.approx(6**0.5 / 24)
    assert from_flags(**mup, mup_width_mult=8.0).variants.mup.logit_mult == 0.25


def test_flags_that_need_another():
    assert (
        from_flags(num_query_groups=1).num_query_groups == 4
    )  # without --group-query-attention: as many as heads
    assert from_flags(rope_scaling_factor=8.0).rotary.scaling_factor is None
    assert from_flags(recompute_activations=True).recompute == RecomputeConfig("selective")
    assert from_flags(squared_relu=True).activation == "squared_relu"
    assert from_flags(quick_geglu=True).activation == "quick_gelu"
    assert from_flags(add_position_embedding=False).position_embedding_type == "none"
    assert from_flags(disable=True).position_embedding_type == "learned_absolute"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 33}, "--hidden-size 33 is not a multiple of --num-attention-heads 4"),
        ({"num_layers": 0}, "--num-layers 0: give a number > 0"),
        ({"ffn_hidden_size": -4}, "--ffn-hidden-size -4"),
        ({"layernorm_epsilon": 0.0}, "--norm-epsilon 0.0"),
        ({"num_query_groups": 3}, "--num-query-groups 3 must divide --num-attention-heads 4"),
        ({"padded_vocab_size": 60}, "--padded-vocab-size 60 is smaller than --vocab-size 61"),
        (
            {"position_embedding_type": "alibi"},
            "--position-embedding-type alibi: choose one of learned_absolute",
        ),
        ({"normalization": "BatchNorm"}, "--normalization BatchNorm: choose one of LayerNorm, RMSNorm"),
        ({"activation": "tanh"}, "activation tanh: choose one of gelu"),
        ({"hidden_dropout": 1.0}, r"--hidden-dropout 1.0: give a probability in \[0, 1\)"),
        ({"init_method_std": -1.0}, "--init-method-std -1.0"),
        ({"cp_comm_type": ("p2p", "a2a", "p2p")}, "--cp-comm-type has 3 values"),
        (
            {"position_embedding_type": "rope", "rotary": RotaryConfig(percent=0.4)},
            "--rotary-percent 0.4 of a head of 8 channels turns 3",
        ),
    ],
)
def test_bad_models_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(**changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RotaryConfig(percent=0.0), "--rotary-percent 0.0"),
        (lambda: RotaryConfig(base=-1), "--rotary-base -1"),
        (lambda: RotaryConfig(seq_len_interpolation_factor=0), "--rotary-seq-len-interpolation-factor 0"),
        (
            lambda: RecomputeConfig("some"),
            "--recompute-granularity some: choose one of unset, full, selective",
        ),
        (lambda: RecomputeConfig("full"), "--recompute-method .* None: choose one of uniform, block"),
        (lambda: RecomputeConfig("full", "block"), "--recompute-num-layers None"),
        (lambda: RecomputeConfig("selective", num_layers=2), "--recompute-num-layers 2 belong to"),
        (
            lambda: RecomputeConfig("selective", modules=("router",)),
            "--recompute-modules router: choose one of",
        ),
        (
            lambda: from_flags(swiglu=True, squared_relu=True),
            "--swiglu and --squared-relu exclude each other",
        ),
        (lambda: from_flags(recompute_activations=True, recompute_granularity="full"), "drop one of the two"),
        (lambda: from_flags(hidden_size=None), "--hidden-size is missing"),
    ],
)
def test_contradictory_flags_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_configs_are_frozen_and_replace_validates():
    config = tiny_config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_layers = 3
    assert config.replace(num_layers=3).num_layers == 3 and config.num_layers == 2
    with pytest.raises(ValueError, match="--num-layers -1"):
        config.replace(num_layers=-1)
