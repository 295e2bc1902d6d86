"""Pretrain a model with experts: a preset's flags, if any, then those given, which win; parse -> build -> train.

torchrun --nproc-per-node 4 pretrain_deepseek.py [--preset deepseek-v3-tiny] --expert-model-parallel-size 2 ...
(presets: megatron/models/presets_experts.py; flags: docs/flags.md. With --num-layers and without --preset all of
the model is as the flags say, as in pretrain_gpt.py.)
"""

import sys
from collections.abc import Sequence

from megatron.models.presets import with_preset
from megatron.train.errors import one_line_errors
from megatron.train.main import main


def words(given: Sequence[str]) -> list[str]:
    """The flags of the preset that is named, else of the tiny one if no flag describes a model, then the others."""
    return with_preset(given, "deepseek-v3-tiny")


if __name__ == "__main__":
    with one_line_errors():
        command_line = words(sys.argv[1:])
    main(command_line)
