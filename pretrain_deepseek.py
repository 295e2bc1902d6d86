"""Pretrain a model with experts: a preset's flags, then those given, which win; parse -> build -> train.

torchrun --nproc-per-node 4 pretrain_deepseek.py [--preset deepseek-v3-tiny] --expert-model-parallel-size 2 ...
(presets: megatron/models/presets_experts.py; flags: docs/flags.md)
"""

import sys

from megatron.models.presets import with_preset
from megatron.train.errors import one_line_errors
from megatron.train.main import main

if __name__ == "__main__":
    with one_line_errors():
        command_line = with_preset(sys.argv[1:], "deepseek-v3-tiny")
    main(command_line)
