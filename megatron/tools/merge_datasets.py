"""Merges .bin/.idx pairs into one.

python -m megatron.tools.merge_datasets --input FOLDER --output-prefix PREFIX
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.tools.indexed_output import merge


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="merge_datasets", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        help="a folder (all its pairs, sorted by name), or prefixes in order",
    )
    parser.add_argument("--output-prefix", required=True, help="path of the result without .bin and .idx")
    args = parser.parse_args(argv)
    try:
        documents, tokens = merge(_prefixes(args.input), args.output_prefix)
    except ValueError as error:
        print(f"merge_datasets: {error}", file=sys.stderr)
        return 2
    print(f"{args.output_prefix}: {documents} documents, {tokens} tokens")
    return 0


def _prefixes(inputs: Sequence[str]) -> list[str]:
    prefixes: list[str] = []
    for name in inputs:
        folder = Path(name)
        if folder.is_dir():
            prefixes.extend(str(path.with_suffix("")) for path in sorted(folder.glob("*.idx")))
        else:
            prefixes.append(name)
    return prefixes


if __name__ == "__main__":
    sys.exit(main())
