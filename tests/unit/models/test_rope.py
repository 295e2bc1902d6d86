"""Rotary positions: properties that define them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron.models.config import RotaryConfig
from megatron.models.rope import apply_rotary, inverse_frequencies, rotary_table

CONFIGS = st.builds(
    RotaryConfig,
    base=st.sampled_from([10.0, 10000.0, 500000.0]),
    interleaved=st.booleans(),
    seq_len_interpolation_factor=st.sampled_from([None, 1.0, 4.0]),
    scaling_factor=st.sampled_from([None, 8.0]),
)


@settings(max_examples=30, deadline=None)
@given(config=CONFIGS, dim=st.sampled_from([2, 8, 64]), shift=st.integers(0, 40), seed=st.integers(0, 99))
def test_scores_depend_on_distance_alone(config, dim, shift, seed):
    torch.manual_seed(seed)
    query, key = torch.randn(2, 1, 1, 1, dim, dtype=torch.float64)

    def score(at: int) -> float:
        tables = [rotary_table(config, dim, torch.tensor([[at + offset]])) for offset in (7, 2)]
        turned = [apply_rotary(x, t, config.interleaved) for x, t in zip((query, key), tables, strict=True)]
        assert abs(turned[0].norm() - query.norm()) < 1e-6 * query.norm()
        return float((turned[0] * turned[1]).sum())

    assert abs(score(0) - score(shift)) < 2e-5 * float(query.norm() * key.norm())


def test_channels_beyond_the_rotary_ones_pass():
    config = RotaryConfig(percent=0.5)
    x = torch.randn(5, 2, 3, 8)
    out = apply_rotary(x, rotary_table(config, 4, torch.arange(5).expand(2, 5)))
    assert torch.equal(out[..., 4:], x[..., 4:]) and torch.equal(out[0], x[0])
    assert not torch.equal(out[1, ..., :4], x[1, ..., :4])


def test_each_sample_has_its_own_positions():
    config = RotaryConfig()
    x = torch.randn(3, 2, 1, 8)
    positions = torch.tensor([[0, 1, 2], [0, 0, 1]])
    out = apply_rotary(x, rotary_table(config, 8, positions))
    for sample in range(2):
        alone = apply_rotary(
            x[:, sample : sample + 1], rotary_table(config, 8, positions[sample : sample + 1])
        )
        assert torch.equal(out[:, sample : sample + 1], alone)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_scaling_is_that_of_transformers(factor):
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    theirs = LlamaConfig(
        hidden_size=256,
        num_attention_heads=2,
        max_position_embeddings=131072,
        rope_theta=500000.0,
        rope_parameters=scaling,
    )
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](theirs, "cpu")
    ours = inverse_frequencies(RotaryConfig(base=500000.0, scaling_factor=factor), 128)
    torch.testing.assert_close(ours, expected, rtol=2e-6, atol=0)
    assert ours.dtype is torch.float32


def test_tables_are_fp32_and_follow_the_positions_device():
    """I02: nothing to initialise, nothing to cast, the same on every rank and pipeline chunk."""
    cos, sin = rotary_table(RotaryConfig(), 8, torch.zeros(2, 3, dtype=torch.long, device="meta"))
    assert cos.is_meta and cos.dtype is sin.dtype is torch.float32 and cos.shape == (3, 2, 1, 8)
