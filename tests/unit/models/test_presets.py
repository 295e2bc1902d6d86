"""Presets are valid flags that make valid models."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron.models.config import ModelConfig
from megatron.models.presets import PRESETS, preset_flags
from megatron.train.arguments.values import layer_pattern

NEGATED = {"disable_bias_linear": ("add_bias_linear", False)}
RENAMED = {"norm_epsilon": "layernorm_epsilon"}


def config_of(name: str) -> ModelConfig:
    """The model of a preset, by the rule flag -> destination."""
    values = {}
    for flag, value in PRESETS[name].items():
        dest = flag.removeprefix("--").replace("-", "_")
        if dest in NEGATED:
            dest, value = NEGATED[dest]
        values[RENAMED.get(dest, dest)] = layer_pattern(value) if dest == "moe_layer_freq" else value
    return ModelConfig.from_arguments(SimpleNamespace(**values))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_models(name):
    config = config_of(name)
    assert config.num_layers == PRESETS[name]["--num-layers"]
    assert config.gated_linear_unit == ("--swiglu" in PRESETS[name])
    assert PRESETS[name]["--seq-length"] <= config.max_position_embeddings


def test_preset_flags_are_command_line_words():
    words = preset_flags("llama2-70b")
    assert words[words.index("--num-query-groups") + 1] == "8"
    assert "--swiglu" in words and "True" not in words
    with pytest.raises(ValueError, match="preset 'gpt-5' is unknown: choose one of deepseek-v3-671b"):
        preset_flags("gpt-5")
