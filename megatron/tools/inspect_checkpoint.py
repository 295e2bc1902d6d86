"""What is inside a checkpoint, whether it is whole, and how two differ.

    python -m megatron.tools.inspect_checkpoint show DIR        step, layout, sizes, files
    python -m megatron.tools.inspect_checkpoint verify DIR      every byte against its checksum
    python -m megatron.tools.inspect_checkpoint diff DIR DIR    arguments, tensors, and with --values their content

DIR is the --save folder of a run (its newest whole checkpoint, or --ckpt-step) or one iter_* folder in it. Nothing is
written, and no GPU or process group is needed. Exit status: 0; 1 for damage or differences; 2 after one line on what is
wrong with the command.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megatron.train.checkpoint import (
    METADATA_FILE,
    RUN_FILE,
    CheckpointReader,
    ChoiceOptions,
    RunRecord,
    existing_directory,
    faults,
    find_checkpoint,
    iterations_in,
    read_record_of,
)

MIB = 2.0**20
_SHORT = {torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16"}


def directory_named(path: str, step: int | None = None) -> Path:
    """The checkpoint that the user means.

    Raises ValueError: there is none at `path`, or none is whole.
    """
    one = Path(path)
    if (one / RUN_FILE).exists() or (one / METADATA_FILE).exists():
        return one
    found = find_checkpoint(path, ChoiceOptions(step, flag="DIR"))
    if found is None:
        raise ValueError(
            f"{path} holds no checkpoint; give the --save directory of a run, or an iter_* one in it"
        )
    return existing_directory(path, found.iteration)


def summary(directory: Path) -> dict[str, Any]:
    """All that `show` tells, as plain data; tensors by kind (model, optimizer, ...) and each with shape and dtype.

    Raises ValueError naming a file that cannot be read.
    """
    record, reader = read_record_of(directory, "DIR"), CheckpointReader(directory, "DIR")
    kinds: dict[str, dict[str, Any]] = {}
    tensors = {}
    for name, entry in reader.tensors.items():
        dtype, numel = entry.properties.dtype, math.prod(entry.size)
        short = _SHORT.get(dtype, str(dtype).removeprefix("torch."))
        tensors[name] = {"shape": list(entry.size), "dtype": short, "pieces": len(entry.chunks)}
        kind = kinds.setdefault(
            name.split(".", 1)[0], {"tensors": 0, "elements": 0, "bytes": 0, "dtypes": []}
        )
        kind["tensors"] += 1
        kind["elements"] += numel
        kind["bytes"] += numel * dtype.itemsize
        kind["dtypes"] = sorted({*kind["dtypes"], short})
    return {
        "directory": str(directory),
        "progress": asdict(record.progress),
        "torch_version": record.torch_version,
        "world_size": record.world_size,
        "layout": dict(record.layout),
        "model": dict(record.model),
        "schedule": dict(record.schedule),
        "data": dict(record.data),
        "kinds": kinds,
        "objects": reader.objects,
        "files": {path.name: path.stat().st_size for path in sorted(directory.iterdir())},
        "tensors": tensors,
        "arguments": dict(record.arguments),
    }


def describe(told: Mapping[str, Any], *, keys: bool = False, arguments: bool = False) -> list[str]:
    """The lines of `show`."""
    progress = told["progress"]
    layout = ", ".join(f"{axis} {size}" for axis, size in told["layout"].items() if size > 1)
    lines = [
        told["directory"],
        f"  step      {progress['iteration']}, {progress['consumed_train_samples']} samples, "
        f"{progress['skipped_iterations']} skipped",
        f"  saved by  {told['world_size']} ranks{f' ({layout})' if layout else ''}, torch {told['torch_version']}",
        f"  model     {_in_words(told['model'])}",
    ]
    for kind, counts in told["kinds"].items():
        lines.append(
            f"  {kind:<9} {counts['tensors']} tensors, {counts['elements']} elements, "
            f"{counts['bytes'] / MIB:.2f} MiB, {' '.join(counts['dtypes'])}"
        )
    lines.append(f"  objects   {len(told['objects'])}: {' '.join(told['objects'][:8])}")
    total = sum(told["files"].values())
    lines.append(f"  files     {len(told['files'])}, {total / MIB:.2f} MiB")
    lines += [f"            {name} {size}" for name, size in told["files"].items()]
    if keys:
        lines += [
            f"{name} {tuple(one['shape'])} {one['dtype']}, {one['pieces']} piece(s)"
            for name, one in told["tensors"].items()
        ]
    if arguments:
        lines += [f"{name} = {value!r}" for name, value in sorted(told["arguments"].items())]
    return lines


def _in_words(model: Mapping[str, Any]) -> str:
    """The fields that say the size of a model."""
    names = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "vocab_size")
    parts = [f"{name} {model[name]}" for name in names if model.get(name) is not None]
    experts = (model.get("moe") or {}).get("num_experts")
    return ", ".join([*parts, *([f"{experts} experts"] if experts else [])])


def verify(directory: Path) -> list[str]:
    """Faults of a checkpoint, all bytes read; empty: it is whole."""
    return faults(directory, contents=True)


def differences(one: Path, other: Path, *, values: bool = False) -> Iterator[str]:
    """What differs between two checkpoints, a line each.

    values: also compare the content of every tensor that both have with one shape, one tensor in memory at a time.
    """
    first, second = read_record_of(one, "DIR"), read_record_of(other, "DIR")
    yield from _record_differences(first, second)
    readers = CheckpointReader(one, "DIR"), CheckpointReader(other, "DIR")
    names = [reader.tensors.keys() | set(reader.objects) for reader in readers]
    for name in sorted(names[0] ^ names[1]):
        yield f"{name}: only in {one if name in names[0] else other}"
    for name in sorted(readers[0].tensors.keys() & readers[1].tensors.keys()):
        left, right = (reader.tensors[name] for reader in readers)
        if left.size != right.size:
            yield f"{name}: shape {tuple(left.size)} and {tuple(right.size)}"
            continue
        if left.properties.dtype != right.properties.dtype:
            yield f"{name}: {left.properties.dtype} and {right.properties.dtype}"
        if values:
            a, b = (reader.tensor(name) for reader in readers)
            if not torch.equal(a, b.to(a.dtype)):
                gap = (a.double() - b.double()).abs()
                yield f"{name}: {int((gap != 0).sum())} of {gap.numel()} elements differ, at most by {gap.max():g}"


def _record_differences(one: RunRecord, other: RunRecord) -> Iterator[str]:
    for part in ("progress", "layout", "model", "schedule", "arguments"):
        left, right = ({**asdict(record)[part]} for record in (one, other))
        for name in sorted(left.keys() | right.keys()):
            if left.get(name) != right.get(name):
                yield f"{part}.{name}: {left.get(name)!r} and {right.get(name)!r}"


def run(args: argparse.Namespace) -> int:
    """Carry out a command; returns the exit status."""
    if args.command == "diff":
        lines = list(differences(directory_named(args.one), directory_named(args.other), values=args.values))
        print("\n".join(lines) if lines else "no differences")
        return 1 if lines else 0
    if args.command == "show":
        told = summary(directory_named(args.directory, args.ckpt_step))
        text = json.dumps(told, indent=1, default=str) if args.json else None
        print(text or "\n".join(describe(told, keys=args.keys, arguments=args.arguments)))
        return 0
    directories = _to_verify(args.directory, args.ckpt_step, every=args.all)
    status = 0
    for directory in directories:
        found = verify(directory)
        status |= bool(found)
        print("\n".join(found) if found else f"{directory} is whole")
    return status


def _to_verify(path: str, step: int | None, *, every: bool) -> list[Path]:
    """The directories to verify; unlike `directory_named` it does not look for a whole one."""
    one = Path(path)
    if (one / RUN_FILE).exists() or (one / METADATA_FILE).exists():
        return [one]
    present = iterations_in(path)
    chosen = present if every else [step] if step is not None else present[-1:]
    if not chosen:
        directory_named(path, step)  # says what is there instead
    return [existing_directory(path, iteration) for iteration in chosen]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    args = _parser().parse_args(argv)
    try:
        return run(args)
    except ValueError as error:
        from megatron.train.errors import is_users

        if not is_users(error):
            raise
        print(f"inspect_checkpoint: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="inspect_checkpoint", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="what is inside")
    show.add_argument("directory")
    show.add_argument("--ckpt-step", type=int, help="iteration (default: the newest whole one)")
    show.add_argument("--keys", action="store_true", help="every tensor with shape and dtype")
    show.add_argument("--arguments", action="store_true", help="every argument of the run that saved it")
    show.add_argument("--json", action="store_true", help="all of it, as JSON")
    check = commands.add_parser("verify", help="whether every byte is as it was saved")
    check.add_argument("directory")
    check.add_argument("--ckpt-step", type=int, help="iteration (default: the newest)")
    check.add_argument("--all", action="store_true", help="every checkpoint of the folder")
    diff = commands.add_parser("diff", help="how two differ")
    diff.add_argument("one")
    diff.add_argument("other")
    diff.add_argument("--values", action="store_true", help="also the content of tensors")
    return parser


if __name__ == "__main__":
    sys.exit(main())
