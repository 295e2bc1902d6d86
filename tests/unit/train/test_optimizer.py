"""Parameter groups and the choice of an implementation."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from megatron.train.optimizer import OptimizerConfig, build_optimizer, group_options, parameter_groups

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


def test_the_backends_adam_gets_what_it_needs() -> None:
    class Adam(torch.optim.AdamW):
        def __init__(self, groups: object, *, adam_w_mode: bool, **options: object) -> None:
            assert adam_w_mode
            super().__init__(groups, **options)  # type: ignore[arg-type]

    optimizer = build_optimizer(named(), OptimizerConfig(implementation="te", eps=1e-5), lambda: Adam)
    assert isinstance(optimizer, Adam)
    assert optimizer.defaults["eps"] == 1e-5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "lion"}, "--optimizer lion"),
        (
            {"kind": "sgd", "implementation": "te"},
            "--optimizer-impl te is no implementation of --optimizer sgd",
        ),
        ({"implementation": "te"}, "has no Adam of its own"),
        ({"implementation": "apex"}, "apex is not installed"),
    ],
)
def test_what_cannot_be_built_is_named(changes: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build_optimizer(named(), dataclasses.replace(OptimizerConfig(), **changes))


def test_a_frozen_model_has_nothing_to_optimise() -> None:
    with pytest.raises(ValueError, match="no trainable parameter"):
        build_optimizer([("a", nn.Parameter(torch.ones(1), requires_grad=False))], OptimizerConfig())
