"""Known models as Megatron flags: plain data that a user can read, print, paste into a script and change.

A value True is a bare flag. Parallelism, batch sizes and optimizers are no part of a preset: they belong to
the machine and the run.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megatron.models.presets_experts import EXPERT_PRESETS

FlagValue = bool | int | float | str

_GPT2_SHAPE: dict[str, FlagValue] = {
    "--position-embedding-type": "learned_absolute",
    "--normalization": "LayerNorm",
    "--attention-dropout": 0.1,
    "--hidden-dropout": 0.1,
    "--init-method-std": 0.02,
}

_LLAMA_SHAPE: dict[str, FlagValue] = {
    "--position-embedding-type": "rope",
    "--normalization": "RMSNorm",
    "--swiglu": True,
    "--disable-bias-linear": True,
    "--untie-embeddings-and-output-weights": True,
    "--attention-dropout": 0.0,
    "--hidden-dropout": 0.0,
    "--init-method-std": 0.02,
}

PRESETS: dict[str, dict[str, FlagValue]] = {
    # GPT-2 medium's shape, Megatron's usual first model (https://arxiv.org/abs/1909.08053)
    "gpt-345m": {
        **_GPT2_SHAPE,
        "--num-layers": 24,
        "--hidden-size": 1024,
        "--num-attention-heads": 16,
        "--seq-length": 1024,
        "--max-position-embeddings": 1024,
        "--vocab-size": 50257,
    },
    # minutes on two CPU cores
    "gpt-tiny": {
        **_GPT2_SHAPE,
        "--num-layers": 4,
        "--hidden-size": 128,
        "--num-attention-heads": 4,
        "--seq-length": 128,
        "--max-position-embeddings": 128,
        "--vocab-size": 2048,
        "--attention-dropout": 0.0,
        "--hidden-dropout": 0.0,
    },
    "llama-tiny": {
        **_LLAMA_SHAPE,
        "--num-layers": 4,
        "--hidden-size": 128,
        "--ffn-hidden-size": 352,
        "--num-attention-heads": 4,
        "--group-query-attention": True,
        "--num-query-groups": 2,
        "--seq-length": 128,
        "--max-position-embeddings": 128,
        "--vocab-size": 2048,
    },
    # Llama 2 7B (https://arxiv.org/abs/2307.09288)
    "llama2-7b": {
        **_LLAMA_SHAPE,
        "--num-layers": 32,
        "--hidden-size": 4096,
        "--ffn-hidden-size": 11008,
        "--num-attention-heads": 32,
        "--seq-length": 4096,
        "--max-position-embeddings": 4096,
        "--vocab-size": 32000,
        "--norm-epsilon": 1e-5,
    },
    # Llama 2 70B: grouped queries
    "llama2-70b": {
        **_LLAMA_SHAPE,
        "--num-layers": 80,
        "--hidden-size": 8192,
        "--ffn-hidden-size": 28672,
        "--num-attention-heads": 64,
        "--group-query-attention": True,
        "--num-query-groups": 8,
        "--seq-length": 4096,
        "--max-position-embeddings": 4096,
        "--vocab-size": 32000,
        "--norm-epsilon": 1e-5,
    },
    # Llama 3.1 8B (https://arxiv.org/abs/2407.21783): long rotary base, scaled frequencies
    "llama3.1-8b": {
        **_LLAMA_SHAPE,
        "--num-layers": 32,
        "--hidden-size": 4096,
        "--ffn-hidden-size": 14336,
        "--num-attention-heads": 32,
        "--group-query-attention": True,
        "--num-query-groups": 8,
        "--rotary-base": 500000,
        "--use-rope-scaling": True,
        "--rope-scaling-factor": 8.0,
        "--seq-length": 8192,
        "--max-position-embeddings": 131072,
        "--vocab-size": 128256,
        "--norm-epsilon": 1e-5,
    },
    **EXPERT_PRESETS,
}


def preset_flags(name: str) -> list[str]:
    """The preset as command-line words, for `parse_args` or a shell script.

    Raises ValueError with the known names for an unknown one.
    """
    if name not in PRESETS:
        raise ValueError(f"preset {name!r} is unknown: choose one of {', '.join(sorted(PRESETS))}")
    words: list[str] = []
    for flag, value in PRESETS[name].items():
        words += [flag] if value is True else [flag, str(value)]
    return words


DESCRIBES = ("--num-layers", "--encoder-num-layers", "--yaml-cfg", "--use-checkpoint-args")
"""Flags that say which model it is, or where that is said: a preset beside them would fill in another one's sizes."""


def with_preset(given: Sequence[str], default: str) -> list[str]:
    """The flags of the preset that --preset NAME or --preset=NAME names, then the other words.

    Without --preset those of `default`, unless the words describe a model themselves (DESCRIBES).
    Raises ValueError for a preset that is unknown, without a name, or given twice.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--preset", action="append")
    try:
        known, rest = parser.parse_known_args(list(given))
    except argparse.ArgumentError:
        raise ValueError(f"--preset needs a name, such as {default}") from None
    if not known.preset and any(word.partition("=")[0] in DESCRIBES for word in rest):
        return rest
    names = known.preset or [default]
    if len(names) > 1:
        raise ValueError(f"--preset {' and --preset '.join(names)}: give one preset")
    return [*preset_flags(names[0]), *rest]
