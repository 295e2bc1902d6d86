"""Runs a script under FUNCTIONAL_TEST_HOOKS: torchrun ... tests/functional/hooked.py pretrain_gpt.py FLAGS."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    sys.path[0] = str(ROOT)  # as if the script had been started itself
    from tests.functional.hooks import entered

    script = sys.argv[1]
    sys.argv[:] = sys.argv[1:]
    with entered(os.environ.get("FUNCTIONAL_TEST_HOOKS", "")):
        runpy.run_path(str(ROOT / script), run_name="__main__")


if __name__ == "__main__":
    main()
