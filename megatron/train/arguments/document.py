"""Writes docs/flags.md from the tables: `python -m megatron.train.arguments.document [--check] [PATH]`."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron.train.arguments.flag import Flag, Switch
from megatron.train.arguments.rules import RULES
from megatron.train.arguments.tables import GROUPS, flags

DEFAULT_PATH = Path(__file__).resolve().parents[3] / "docs" / "flags.md"

_MEANING = {
    "works": "is read in the file named, and the test named fails without it",
    "no-op": "is accepted and has no effect here, for the reason given; the log says so once",
    "refused": "is not there: its default is accepted, another value is refused, with what to use instead",
}

_INTRODUCTION = """# Flags

Made from the tables in `megatron/train/arguments/tables` by `python -m megatron.train.arguments.document`;
do not edit. Every flag of Megatron-LM is here with its name, type, default, choices and aliases, so that
its launch scripts parse unchanged. What happens with each:

{meanings}

No flag is accepted and silently ignored. An unknown flag is an error that names the nearest one. All checks
are done before any process group exists, with one line that names the flags, their values and the fix.
`--validate-only` prints the resolved configuration as JSON for the number of ranks in `WORLD_SIZE` (1 if
unset) and stops.

Deviations from Megatron-LM:

- `--distributed-backend` and `--transformer-impl` default to `auto`: NCCL and Transformer Engine on CUDA
  where they are present, else gloo and torch. An explicit `nccl` or `transformer_engine` on a machine
  without CUDA runs as gloo or torch, with one warning.
- There is one FSDP wrapper always. `--use-megatron-fsdp` takes its strategy from
  `--data-parallel-sharding-strategy`; else `--use-distributed-optimizer` means `optim`; else `no_shard`.
  `--use-torch-fsdp2` means `optim_grads_params`. The dtypes of `--megatron-fsdp-...` count for all of them.
- `--max-position-embeddings` may be left out: it is then the sequence length. `--save` may stand without
  `--save-interval`: the run then saves at its end.
- `--num-query-groups` without `--group-query-attention` is an error; Megatron-LM ignores it.
- `--main-grads-dtype` also takes `fp64`, and `--tokenizer-type` also `ByteLevelTokenizer`.
- Restrictions of Megatron-LM that its own code needs and this one does not are not checked (Torch FSDP2
  with tied embeddings, Megatron-FSDP with other checkpoint formats, environment variables for NCCL and
  streams).
"""


def document() -> str:
    """The whole page."""
    counts = Counter(flag.status.replace("_", "-") for flag in flags())
    meanings = "\n".join(
        f"- **{name}** ({counts[name]} flags): {meaning}." for name, meaning in _MEANING.items()
    )
    parts = [_INTRODUCTION.format(meanings=meanings)]
    for title, members in GROUPS.items():
        parts.append(
            f"\n## {title}\n\n| flag | value | status | what it does, or why not |\n|---|---|---|---|\n"
        )
        parts += [f"| {' | '.join(_cells(flag))} |\n" for flag in members]
    parts.append(
        "\n## Flags that cannot stand together, or need each other\n\n| flags | what to do |\n|---|---|\n"
    )
    parts += [f"| {_code(rule.example)} | {_plain(rule.fix)} |\n" for rule in RULES]
    return "".join(parts)


def _cells(flag: Flag) -> Iterator[str]:
    yield ", ".join(f"`{spelling}`" for spelling in flag.spellings)
    yield _value(flag)
    yield flag.status.replace("_", "-")
    text = flag.help if flag.status == "works" else _sentence(flag.reason)
    for value, reason in flag.refused_values:
        text += f" `{value}` is refused: {reason}."
    if flag.also_accepted:
        text += " Accepted too: " + ", ".join(f"`{value}`" for value in flag.also_accepted) + "."
    if flag.read_by:
        text += f" Read in `{flag.read_by.removeprefix('megatron/')}`"
        text += f", tested in `{flag.test.removeprefix('tests/')}`."
    yield _plain(text)


def _value(flag: Flag) -> str:
    if isinstance(flag.type, Switch):
        return "switch" if flag.type is not Switch.TOGGLE else "switch, and `--no-...`"
    name = getattr(flag.type, "__name__", str(flag.type)).replace("_", " ")
    shape = "" if flag.nargs is None else f" x {flag.nargs}" if isinstance(flag.nargs, int) else " ..."
    default = getattr(flag.default, "name", flag.default)
    shown = "" if default is None else f", default {_code(_words(default))}"
    choices = "" if not flag.choices else ": " + ", ".join(f"`{choice}`" for choice in flag.choices)
    return f"{name}{shape}{shown}{choices}"


def _words(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _code(text: str) -> str:
    return f"`{_plain(text)}`" if text else "empty"


def _plain(text: str) -> str:
    return text.replace("|", "\\|")


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."


def main(argv: Sequence[str]) -> int:
    """Writes the page, or with --check says whether it is up to date. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron.train.arguments.document", description=main.__doc__
    )
    parser.add_argument("path", nargs="?", type=Path, default=DEFAULT_PATH, help="the page (%(default)s)")
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(argv)
    path: Path = options.path
    if options.check:
        fresh = path.is_file() and path.read_text(encoding="utf-8") == document()
        if not fresh:
            print(
                f"{path} is not up to date: run python -m megatron.train.arguments.document", file=sys.stderr
            )
        return 0 if fresh else 1
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(document(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
