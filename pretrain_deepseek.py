"""Pretrain a model with experts: a preset's flags, then those given, which win; parse -> build -> train.

torchrun --nproc-per-node 4 pretrain_deepseek.py [--preset deepseek-v3-tiny] --expert-model-parallel-size 2 ...
(presets: megatron/models/presets_experts.py; flags: docs/flags.md)
"""

import sys

from megatron.models.presets import preset_flags
from megatron.train.errors import one_line_errors
from megatron.train.main import main


def words(given: list[str]) -> list[str]:
    """The flags of the preset that --preset names (deepseek-v3-tiny), then the others."""
    name, rest = "deepseek-v3-tiny", list(given)
    if "--preset" in rest:
        position = rest.index("--preset")
        name = rest[position + 1] if position + 1 < len(rest) else ""
        del rest[position : position + 2]
    return [*preset_flags(name), *rest]


if __name__ == "__main__":
    with one_line_errors():
        command_line = words(sys.argv[1:])
    main(command_line)
