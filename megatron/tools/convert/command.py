"""The command line of `python -m megatron.tools.convert_checkpoint`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

DESCRIPTION = """Converts checkpoints, offline, on CPU, about one layer in memory at a time.

    from-hugging-face --load HF_FOLDER --save CHECKPOINTS      safetensors -> ours
    to-hugging-face --load CHECKPOINTS --save HF_FOLDER        ours -> safetensors
    from-megatron-core --load CHECKPOINTS --save CHECKPOINTS   torch_dist or fsdp_dtensor, with optimizer -> ours

Nothing is overwritten: --save names a folder that does not exist. docs/recipes/convert.md has examples.
"""

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
_DTYPES = ("fp32", "bf16", "fp16")


def run(args: argparse.Namespace) -> list[str]:
    """Do what the command line asks for; returns lines for the user. Raises ValueError with one line."""
    if args.command == "from-hugging-face":
        from megatron.tools.convert.import_hugging_face import import_hugging_face

        return import_hugging_face(Path(args.load), Path(args.save))
    if args.command == "from-megatron-core":
        from megatron.tools.convert.import_core import ImportOptions, import_core

        taken = ImportOptions(args.vocab_size, args.ckpt_step, not args.no_load_optim)
        return import_core(Path(args.load), Path(args.save), taken)
    from megatron.tools.convert.export_hugging_face import ExportOptions, export_hugging_face
    from megatron.tools.loading import whole_checkpoint
    from megatron.train.build import DTYPES

    root, iteration = whole_checkpoint(args.load, args.ckpt_step)
    options = ExportOptions(
        like=None if args.like is None else Path(args.like),
        dtype=None if args.dtype is None else DTYPES[args.dtype],
        max_file_bytes=args.max_file_size,
    )
    return export_hugging_face(root, iteration, Path(args.save), options)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status: 0, or 2 after one line on what is wrong."""
    args = _parser().parse_args(argv)
    from megatron.train.errors import is_users
    from megatron.train.initialize import quiet_libraries

    quiet_libraries()
    try:
        lines = run(args)
    except (ValueError, RuntimeError) as error:
        if not is_users(error):
            raise
        print(f"convert_checkpoint: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0


def _size(word: str) -> int:
    """ "5GB" in bytes."""
    number, unit = word[:-2], word[-2:].upper()
    if unit not in _UNITS or not number.isdigit() or int(number) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is no size such as 5GB or 500MB")
    return int(number) * _UNITS[unit]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="convert_checkpoint",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add = commands.add_parser("from-hugging-face", help="Hugging Face safetensors -> ours").add_argument
    add("--load", required=True, help="folder with config.json and safetensors files")
    add("--save", required=True, help="folder to make; later the --load of a run")
    add = commands.add_parser("to-hugging-face", help="ours -> Hugging Face safetensors").add_argument
    add("--load", required=True, help="the --save folder of a run, or one iter_* folder in it")
    add("--ckpt-step", type=int, help="iteration of the checkpoint (default: the newest whole one)")
    add("--save", required=True, help="folder to make")
    add("--like", help="folder of the same model: its config.json, tokenizer, dtypes and division into files")
    add("--dtype", choices=_DTYPES, help="of the weights (default: as in the checkpoint, or as --like)")
    add("--max-file-size", type=_size, default="5GB", help="of a safetensors file (default: 5GB)")
    add = commands.add_parser("from-megatron-core", help="torch_dist or fsdp_dtensor -> ours").add_argument
    add("--load", required=True, help="folder of an iteration, or the --save folder of a run of Megatron-LM")
    add("--save", required=True, help="folder to make; later the --load of a run")
    add("--ckpt-step", type=int, help="iteration of the checkpoint (default: the one that the marker names)")
    add("--no-load-optim", action="store_true", help="take the weights alone")
    add("--vocab-size", type=int, help="the tokenizer's, where the checkpoint's arguments lack it")
    return parser
