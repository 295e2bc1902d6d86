"""Converts checkpoints between Hugging Face and ours: megatron/tools/convert/, docs/recipes/convert.md.

python -m megatron.tools.convert_checkpoint from-hugging-face --load HF_FOLDER --save CHECKPOINTS
"""

from __future__ import annotations

import sys

from megatron.tools.convert.command import main

if __name__ == "__main__":
    sys.exit(main())
