"""Latent attention, YaRN and multi-token prediction: flags, bad values, and one rank against definitions."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron.models.config import ModelConfig, RotaryConfig
from megatron.models.deepseek import MLAConfig, MTPConfig, YarnConfig
from megatron.models.mla import latent_softmax_scale
from megatron.models.rope import inverse_frequencies
from tests.unit.models.helpers import TINY, build_gpt, random_batch
from tests.unit.models.moe import shapes


def test_flags():
    """Latent attention takes YaRN by itself, at a factor that changes nothing."""
    given = {
        "multi_latent_attention": True,
        "q_lora_rank": 8,
        "kv_lora_rank": 6,
        "qk_head_dim": 4,
        "qk_pos_emb_head_dim": 2,
        "v_head_dim": 3,
        "mtp_num_layers": 2,
        "mtp_loss_scaling_factor": 0.3,
        "position_embedding_type": "rope",
    }
    config = ModelConfig.from_arguments(SimpleNamespace(**TINY, **given))
    assert config.mla == MLAConfig(8, 6, 4, 2, 3) and config.mtp == MTPConfig(2, 0.3)
    assert config.rotary.yarn == YarnConfig() and config.rotary_dim == 2
    plain = ModelConfig.from_arguments(SimpleNamespace(**TINY, **given, rope_type="rope"))
    assert plain.rotary.yarn is None
    stretched = {
        "rotary_scaling_factor": 40.0,
        "yarn_original_max_position_embeddings": 100,
        "yarn_beta_fast": 16.0,
        "yarn_beta_slow": 2.0,
        "mscale": 0.5,
        "mscale_all_dim": 0.7,
        "yarn_correction_range_round_to_int": False,
    }
    config = ModelConfig.from_arguments(SimpleNamespace(**TINY, **given, **stretched))
    assert config.rotary.yarn == YarnConfig(40.0, 100, 16.0, 2.0, 0.5, 0.7, False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MLAConfig(kv_lora_rank=0), "--kv-lora-rank 0: give 1 or more"),
        (lambda: MLAConfig(qk_pos_emb_head_dim=3), "--qk-pos-emb-head-dim 3"),
        (lambda: YarnConfig(0.5), "--rotary-scaling-factor 0.5"),
        (lambda: YarnConfig(beta_fast=1.0, beta_slow=2.0), "--yarn-beta-fast 1.0 must be above"),
        (lambda: MTPConfig(0), "--mtp-num-layers 0"),
        (lambda: shapes.deepseek().replace(mtp=MTPConfig(32)), "--mtp-num-layers 32 looks past the end"),
        (lambda: shapes.deepseek().replace(position_embedding_type="none"), "--multi-latent-attention with"),
        (lambda: shapes.deepseek().replace(num_query_groups=2), "drop --num-query-groups 2"),
        (lambda: RotaryConfig(scaling_factor=8.0, yarn=YarnConfig()), "--use-rope-scaling with YaRN"),
    ],
)
def test_bad_values(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_yarn_keeps_fast_and_divides_slow_frequencies():
    yarn = YarnConfig(8.0, 4096, mscale=1.0, mscale_all_dim=1.0)
    plain = inverse_frequencies(RotaryConfig(), 64)
    stretched = inverse_frequencies(RotaryConfig(yarn=yarn), 64)
    assert torch.equal(stretched[:8], plain[:8])
    assert torch.allclose(stretched[-8:], plain[-8:] / 8.0)
    assert torch.equal(inverse_frequencies(RotaryConfig(yarn=YarnConfig()), 64), plain)
    assert yarn.concentration == 1.0
    config = shapes.deepseek().replace(rotary=RotaryConfig(yarn=yarn))
    assert latent_softmax_scale(config) == pytest.approx(10**-0.5 * (0.1 * 2.0794415 + 1) ** 2)


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_further_tokens_are_weighed_by_their_own_mean(scale):
    """E13: the gradient is lambda / depths x the mean over the depth's own valid tokens, whatever the main loss is."""
    config = shapes.deepseek(load_balancing=("none",), aux_loss_coeff=(0.0,))
    assert config.mtp is not None
    model = build_gpt(config)
    tokens, labels = random_batch(config, length=8)
    mask = torch.ones(2, 8)
    mask[0, 3:] = 0
    found = []
    for layer in model.mtp.layers:
        layer.register_forward_hook(lambda module, args, out: found.append(out))
    model.auxiliary.scale = scale
    losses = model(tokens, labels=labels, loss_mask=mask)
    (0.0 * losses.sum()).backward()
    ours = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    model.zero_grad()
    found.clear()
    model(tokens, labels=labels, loss_mask=mask)
    total, values = torch.zeros(()), []
    for depth, hidden in enumerate(found, start=1):
        logits = model.output_layer(hidden).transpose(0, 1)[:, : 8 - depth, : config.vocab_size]
        each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels[:, depth:], reduction="none")
        valid = mask[:, depth:]
        values.append((each * valid).sum() / valid.sum())
        total = total + config.mtp.loss_scaling_factor / 2 * values[-1]
    (total * scale).backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and parameter.grad.any():
            assert torch.allclose(ours[name], parameter.grad, rtol=1e-4, atol=1e-6), name
    assert model.mtp.layers[1].eh_proj.weight.grad.norm() > 1e-3


@pytest.mark.parametrize("detach", [False, True])
def test_one_layer_for_all_depths_and_heads_that_leave_the_model_alone(detach):
    """The one layer is used at both depths; detached, its losses move neither layers nor the final norm."""
    config = shapes.deepseek(load_balancing=("none",), aux_loss_coeff=(0.0,))
    model = build_gpt(config.replace(mtp=MTPConfig(2, use_repeated_layer=True, detach_heads=detach)))
    assert len(model.mtp.layers) == 1
    calls = []
    model.mtp.layers[0].register_forward_hook(lambda *_: calls.append(1))
    tokens, labels = random_batch(config, length=8)
    (0.0 * model(tokens, labels=labels).sum()).backward()
    assert len(calls) == 2
    moved = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.norm() > 0}
    assert any(name.startswith("mtp.layers.0") for name in moved)
    assert any(name.startswith("decoder.layers") for name in moved) is not detach


def test_evaluation_predicts_one_token_only():
    model = build_gpt(shapes.deepseek())
    tokens, labels = random_batch(model.config, length=8)
    calls = []
    model.mtp.register_forward_hook(lambda *_: calls.append(1))
    model(tokens, labels=labels)
    assert len(calls) == 1, "it runs in training"
    model.eval()
    model(tokens, labels=labels)
    model(tokens)
    assert len(calls) == 1
