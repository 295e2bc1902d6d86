"""Parameter groups and the choice of an implementation."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron.train.adam_states import StateDtypes, decode, encode
from megatron.train.external_adam import ExternalAdam
from megatron.train.muon import MuonConfig, orthogonalise, scale_factor
from megatron.train.optimizer import (
    OptimizerConfig,
    build_optimizer,
    fastest_adam,
    group_options,
    optimizer_config,
    parameter_groups,
    write_group_map,
)
from tests.unit.train.test_arguments import config as train_config

NAMES = {
    "embedding.word_embeddings.weight": (8, 4),
    "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": (4,),
    "decoder.layers.0.self_attention.linear_qkv.weight": (12, 4),
    "decoder.layers.0.self_attention.linear_qkv.bias": (12,),
    "decoder.layers.0.self_attention.q_layernorm.weight": (2,),
    "decoder.final_layernorm.weight": (4,),
    "output_layer.weight": (8, 4),
}


def named() -> list[tuple[str, nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    return [(name, nn.Parameter(torch.randn(shape, generator=generator))) for name, shape in NAMES.items()]


def test_biases_and_vectors_are_not_decayed() -> None:
    decayed = {name for name, p in named() if group_options(name, p, OptimizerConfig()).wd_mult == 1.0}
    assert decayed == {name for name, shape in NAMES.items() if len(shape) == 2}


def test_qk_norms_are_decayed_where_asked() -> None:
    config = OptimizerConfig(decay_qk_norms=True)
    name = "decoder.layers.0.self_attention.q_layernorm.weight"
    assert group_options(name, torch.ones(2), config).wd_mult == 1.0


def test_decoupled_rate_is_of_embedding_and_head() -> None:
    config = OptimizerConfig(decoupled_lr=0.5, decoupled_min_lr=0.1)
    with_rate = {name for name, p in named() if group_options(name, p, config).max_lr == 0.5}
    assert with_rate == {"embedding.word_embeddings.weight", "output_layer.weight"}


def test_groups_hold_every_trainable_parameter_once() -> None:
    parameters = named()
    parameters[2][1].requires_grad_(False)
    groups = parameter_groups(parameters, OptimizerConfig(decoupled_lr=0.5))
    assert [(len(group["params"]), group["wd_mult"]) for group in groups] == [(2, 1.0), (4, 0.0)]
    assert [group.get("max_lr") for group in groups] == [0.5, None]


@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize("implementation", ["fused", "foreach", "loop"])
def test_implementations_agree(kind: str, implementation: str) -> None:
    config = OptimizerConfig(kind=kind, lr=0.1, weight_decay=0.1)
    results = []
    for name in ("loop", implementation):
        parameters = named()
        optimizer = build_optimizer(parameters, dataclasses.replace(config, implementation=name))
        for step in range(3):
            for index, (_, parameter) in enumerate(parameters):
                parameter.grad = torch.full_like(parameter, 0.1 * (step + index))
            optimizer.step()
        results.append([parameter.detach() for _, parameter in parameters])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_auto_is_fused_on_cpu_and_asks_the_backend_only_on_a_gpu() -> None:
    optimizer = build_optimizer(named(), OptimizerConfig(), lambda: pytest.fail("asked"))
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.defaults["fused"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "soap"}, "--optimizer soap"),
        ({"kind": "lion", "implementation": "fused"}, "--optimizer-impl fused: --optimizer lion"),
        (
            {"kind": "sgd", "implementation": "te"},
            "--optimizer-impl te is no implementation of --optimizer sgd",
        ),
        ({"implementation": "te"}, "has no Adam of its own"),
        ({"implementation": "apex"}, "apex is not installed"),
    ],
)
def test_what_cannot_be_built_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build_optimizer(named(), dataclasses.replace(OptimizerConfig(), **changes))


def test_a_frozen_model_has_nothing_to_optimise() -> None:
    with pytest.raises(ValueError, match="no trainable parameter"):
        build_optimizer([("a", nn.Parameter(torch.ones(1), requires_grad=False))], OptimizerConfig())


def test_flags_reach_the_optimizer() -> None:
    words = (
        "--adam-beta1 0.8 --adam-beta2 0.7 --adam-eps 1e-6 --sgd-momentum 0.7 --apply-wd-to-qk-layernorm "
        "--lion-beta1 0.6 --lion-beta2 0.5 --muon-momentum 0.3 --muon-nesterov --muon-num-ns-steps 3 "
        "--muon-coefficient-type simple "
        "--muon-scale-mode unit_rms_norm --muon-extra-scale-factor 0.2 --muon-tp-mode blockwise "
        "--muon-scalar-optimizer lion --muon-fp32-matmul-prec high --optimizer muon --use-precision-aware-optimizer "
        "--exp-avg-dtype bf16 --exp-avg-sq-dtype fp16 --main-params-dtype fp16 --bf16"
    )
    made = train_config(words)
    config = optimizer_config(made)
    assert made.main_params_dtype == "fp16"
    assert (config.betas, config.eps, config.momentum, config.decay_qk_norms) == ((0.8, 0.7), 1e-6, 0.7, True)
    assert config.states == StateDtypes(torch.bfloat16, torch.float16)
    assert config.muon == MuonConfig(
        0.3, True, 3, "simple", "unit_rms_norm", 0.2, "blockwise", "lion", "high", (8, 8), (0.6, 0.5)
    )
    config = optimizer_config(
        train_config("--no-weight-decay-cond-type apply_wd_to_qk_layernorm --muon-no-split-qkv")
    )
    assert config.decay_qk_norms and config.muon.head_rows is None and config.states == StateDtypes()
    mup = optimizer_config(train_config("--use-mup --mup-base-hidden-size 16"))
    assert mup.hidden_lr_mult == 0.25


def test_mup_slows_hidden_matrices_only() -> None:
    config = OptimizerConfig(hidden_lr_mult=0.25)
    slow = {name for name, p in named() if group_options(name, p, config).lr_mult == 0.25}
    assert slow == {"decoder.layers.0.self_attention.linear_qkv.weight"}


def test_the_map_of_groups_is_written(tmp_path: Path) -> None:
    write_group_map(str(tmp_path / "map.json"), named(), OptimizerConfig(decoupled_lr=0.5))
    table = json.loads((tmp_path / "map.json").read_text())
    assert set(table) == set(NAMES)
    assert table["output_layer.weight"] == {"wd_mult": 1.0, "lr_mult": 1.0, "max_lr": 0.5, "min_lr": None}


def trained(config: OptimizerConfig, steps: int = 6) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
    parameters = named()
    optimizer = build_optimizer(parameters, config)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for _, parameter in parameters:
            parameter.grad = 0.01 * torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return [parameter.detach() for _, parameter in parameters], optimizer


def test_averages_in_sixteen_bits() -> None:
    """Ours in fp32 is torch's; in 16 bits it stays near, and the states have the asked dtypes."""
    config = OptimizerConfig(lr=0.1, weight_decay=0.1, betas=(0.9, 0.95))
    exact, _ = trained(dataclasses.replace(config, implementation="loop"))
    wide, _ = trained(dataclasses.replace(config, states=StateDtypes(torch.float64, torch.float64)))
    narrow, optimizer = trained(
        dataclasses.replace(config, states=StateDtypes(torch.bfloat16, torch.float16))
    )
    for one, same, near in zip(exact, wide, narrow, strict=True):
        torch.testing.assert_close(same, one, rtol=1e-5, atol=1e-6)
        assert 0 < (near - one).norm() < 0.01 * (one - one.mean()).norm() + 0.01
    state = next(iter(optimizer.state.values()))
    assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (torch.bfloat16, torch.float16)


def test_fp16_states_hold_small_squares() -> None:
    values = torch.tensor([0.0, -3e-12, 1e-12, 0.5, 3e5])
    torch.testing.assert_close(decode(encode(values, torch.float16)), values, rtol=2e-3, atol=0)


def test_lion_is_its_definition() -> None:
    config = OptimizerConfig(kind="lion", lr=0.1, weight_decay=0.2, muon=MuonConfig(lion_betas=(0.7, 0.9)))
    moved, _ = trained(config)
    parameters, generator = [p.detach().clone() for _, p in named()], torch.Generator().manual_seed(1)
    averages = [torch.zeros_like(p) for p in parameters]
    for _ in range(6):
        for index, p in enumerate(parameters):
            grad = 0.01 * torch.randn(p.shape, generator=generator)
            p -= 0.1 * (0.2 * p + torch.sign(0.7 * averages[index] + 0.3 * grad))
            averages[index] = 0.9 * averages[index] + 0.1 * grad
    for one, other in zip(moved, parameters, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", ["simple", "quintic", "polar_express"])
@pytest.mark.parametrize("shape", [(6, 9), (9, 6)])
def test_orthogonal_directions(kind: str, shape: tuple[int, int]) -> None:
    """All singular values come near one, singular vectors stay."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    out = orthogonalise(matrix, MuonConfig(coefficient_type=kind, num_ns_steps=8))
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    assert ((out - u @ v).norm() / (u @ v).norm()) < 0.35
    values = torch.linalg.svdvals(out)
    assert values.min() > 0.6 and values.max() < 1.3


def test_muon_moves_matrices_by_part_and_the_rest_by_adam() -> None:
    muon = MuonConfig(momentum=0.8, nesterov=True, head_rows=(2, 1), extra_scale_factor=0.5)
    config = OptimizerConfig(kind="muon", lr=0.1, weight_decay=0.2, muon=muon)
    before = dict(named())
    moved, _ = trained(config, steps=1)
    after = dict(zip(NAMES, moved, strict=True))
    generator = torch.Generator().manual_seed(1)
    grads = {name: 0.01 * torch.randn(shape, generator=generator) for name, shape in NAMES.items()}
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    average = 0.2 * grads[name]
    update = (0.2 * grads[name] + 0.8 * average).view(3, 4, 4)
    expected = torch.zeros(3, 4, 4)
    for rows in (slice(0, 2), slice(2, 3), slice(3, 4)):
        part = update[:, rows].reshape(-1, 4)
        scaled = orthogonalise(part, muon) * scale_factor(*part.shape, "spectral") * 0.5
        expected[:, rows] = scaled.view(3, -1, 4)
    torch.testing.assert_close(after[name], before[name] * (1 - 0.02) - 0.1 * expected.view(12, 4))
    adam, _ = trained(dataclasses.replace(config, kind="adam", implementation="loop"), steps=1)
    for other in set(NAMES) - {name}:
        torch.testing.assert_close(after[other], adam[list(NAMES).index(other)], rtol=1e-5, atol=1e-6)


class OneStepAGroup(torch.optim.Optimizer):
    """What Transformer Engine's and apex's FusedAdam do on a GPU, in torch."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, adam_w_mode=True):
        assert adam_w_mode
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            (beta1, beta2), lr = group["betas"], group["lr"]
            for p in group["params"]:
                assert type(p) is nn.Parameter, "a plain tensor with storage"
                first, second = self.state[p]["exp_avg"], self.state[p]["exp_avg_sq"]
                first.lerp_(p.grad, 1 - beta1)
                second.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                mean, square = first / (1 - beta1 ** group["step"]), second / (1 - beta2 ** group["step"])
                p.sub_(lr * (mean / (square.sqrt() + group["eps"]) + group["weight_decay"] * p))


def train(optimizer: torch.optim.Optimizer, parameters: list[tuple[str, nn.Parameter]], steps: range) -> None:
    """Steps with gradients of their own, rates that move, and a parameter that misses one."""
    for step in steps:
        for index, (_, parameter) in enumerate(parameters):
            parameter.grad = (
                torch.full_like(parameter, 0.1 * (step + index)) if (step, index) != (1, 2) else None
            )
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + step)
        optimizer.step()


def test_an_external_adam_is_torchs_and_its_state_goes_on_with_torchs() -> None:
    """Its kernel counts steps by group; a resume with the other implementation changes nothing."""
    config = OptimizerConfig(lr=0.1, weight_decay=0.1, implementation="te")
    ours, theirs = named(), named()
    te = build_optimizer(ours, config, lambda: OneStepAGroup)
    loop = build_optimizer(theirs, dataclasses.replace(config, implementation="loop"))
    assert isinstance(te, ExternalAdam)
    train(te, ours, range(3))
    train(loop, theirs, range(3))
    for (name, one), (_, other) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=name)
        assert te.state[one].keys() == loop.state[other].keys()
        assert te.state[one]["step"] == loop.state[other]["step"]
    te.load_state_dict(copy.deepcopy(loop.state_dict()))  # else both would share moments
    with torch.no_grad():
        for (_, one), (_, other) in zip(ours, theirs, strict=True):
            one.copy_(other)
    train(te, ours, range(3, 5))
    train(loop, theirs, range(3, 5))
    for (_, one), (_, other) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_auto_takes_the_fastest_that_is_there() -> None:
    assert fastest_adam(OneStepAGroup, OneStepAGroup) == "te"
    assert fastest_adam(None, OneStepAGroup) == "apex"
    assert fastest_adam(None, None) == "fused"
    assert (
        type(build_optimizer(named(), OptimizerConfig(), lambda: OneStepAGroup)) is torch.optim.AdamW
    )  # on CPU
