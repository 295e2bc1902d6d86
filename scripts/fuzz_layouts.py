#!/usr/bin/env python3
"""Soak: random legal configurations, one a seed, each compared with its own one-rank run in the warm worker pool.

    scripts/fuzz_layouts.py --seed 1 --count 100 [--max-ranks 8]

Each failure prints the one command that repeats it; status 1 if there is any. The numbers of a run are those of the
functional tests (tests/functional/fuzz.py).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def _use_environment() -> None:
    """Start again with the repository's Python if this one lacks PyTorch."""
    python = Path(os.environ.get("MEGATRON_ND_VENV", ROOT / ".venv")) / "bin" / "python"
    try:
        import torch  # noqa: F401
    except ImportError:
        if python.exists() and Path(sys.executable).resolve() != python.resolve():
            os.execv(python, [str(python), *sys.argv])
        raise


def main() -> int:
    """Run the configurations of the seeds; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--seed", type=int, default=0, help="of the first configuration")
    parser.add_argument("--count", type=int, default=20, help="configurations; each takes the next seed")
    parser.add_argument("--max-ranks", type=int, default=4)
    parser.add_argument("--show", action="store_true", help="print the configurations, run nothing")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from tests.functional import fuzz
    from tests.pool import close_all_pools

    failures = []
    began = time.monotonic()
    for seed in range(options.seed, options.seed + options.count):
        drawn = fuzz.draw(seed, options.max_ranks)
        if options.show:
            print(f"seed {seed}: {drawn.launch.ranks} ranks: {' '.join(drawn.launch.words)}")
            continue
        text = fuzz.failure(drawn)
        if text is not None:
            failures.append(seed)
            print(fuzz.report(drawn, text, options.max_ranks), flush=True)
        elif sys.stdout.isatty() or (seed - options.seed + 1) % 10 == 0:
            print(f"seed {seed}: as one rank ({time.monotonic() - began:.0f} s)", flush=True)
    close_all_pools()
    print(f"{options.count} configurations, {len(failures)} failures" + (f": {failures}" if failures else ""))
    return int(bool(failures))


if __name__ == "__main__":
    _use_environment()
    sys.path[0] = str(ROOT)
    sys.exit(main())
