"""From words to a namespace of Megatron's names. Only a flag's own type and choices are checked here."""

from __future__ import annotations

import argparse
import copy
import difflib
import functools
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from megatron.train.arguments.flag import Flag, Switch
from megatron.train.arguments.tables import GROUPS, flags, flags_by_dest
from megatron.train.arguments.yaml_file import words_from_yaml


class _Parser(argparse.ArgumentParser):
    """argparse whose errors are ValueErrors that name the flag, for the caller to print."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


def parse_args(
    argv: Sequence[str] | None = None, defaults: Mapping[str, object] | None = None
) -> argparse.Namespace:
    """Parses command-line words into a namespace with Megatron's destinations and defaults.

    argv: the words after the program's name; None: this process's. defaults: other defaults by destination
    (a preset); what the user gives wins over them. The namespace also has `explicit`, the frozenset of
    destinations that the user gave on the command line or in the --yaml-cfg file (the command line wins).

    Raises ValueError naming the flag: unknown (with the nearest name), wrong type, not among the choices.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    given = _parse_known(words)
    if getattr(given, "yaml_cfg", None) is not None:
        from_file = vars(_parse_known(words_from_yaml(given.yaml_cfg, flags_by_dest())))
        given = argparse.Namespace(**{**from_file, **vars(given)})
    explicit = frozenset(vars(given))
    preset = dict(defaults or {})
    unknown = sorted(set(preset) - set(flags_by_dest()))
    if unknown:
        raise ValueError(f"the preset sets {', '.join(unknown)}: no flag has such a destination")
    result = argparse.Namespace(**copy.deepcopy({flag.dest: flag.default for flag in reversed(flags())}))
    vars(result).update(copy.deepcopy(preset))
    vars(result).update(vars(given))
    result.explicit = explicit
    return result


def _parse_known(words: Sequence[str]) -> argparse.Namespace:
    """Only what stands in `words`; raises ValueError for words that belong to no flag."""
    given, rest = _parser().parse_known_args(list(words))
    if rest:
        raise ValueError(_unknown_message(rest))
    return given


def _unknown_message(rest: Sequence[str]) -> str:
    names = [word.split("=", 1)[0] for word in rest if word.startswith("-")]
    if not names:
        return f"unexpected value {rest[0]!r}: it follows no flag that takes it"
    spellings = [spelling for flag in flags() for spelling in flag.spellings]
    messages = []
    for name in names:
        tried = "--" + name.lstrip("-").replace("_", "-")
        near = difflib.get_close_matches(tried, spellings, n=1, cutoff=0.6)
        messages.append(f"unknown flag {name}" + (f": did you mean {near[0]}?" if near else ""))
    return "; ".join(messages)


@functools.cache
def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="pretrain",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        description="Flags have Megatron-LM's names and defaults. docs/flags.md says what each does here.",
    )
    for group, members in GROUPS.items():
        section = parser.add_argument_group(group)
        for flag in members:
            _add(section, flag)
    return parser


def _add(section: argparse._ArgumentGroup, flag: Flag) -> None:
    text = (flag.help or f"[{flag.status}] {flag.reason}").replace("%", "%%")
    if isinstance(flag.type, Switch):
        action = argparse.BooleanOptionalAction if flag.type is Switch.TOGGLE else flag.type.value
        section.add_argument(
            *flag.spellings, action=action, dest=flag.dest, default=argparse.SUPPRESS, help=text
        )
        return
    section.add_argument(
        *flag.spellings,
        type=flag.type,
        nargs=flag.nargs,
        choices=flag.choices,
        dest=flag.dest,
        default=argparse.SUPPRESS,
        metavar=None if flag.choices else "X",
        help=text,
    )
