"""The tables of flags against Megatron-LM's own (megatron_flags.tsv: 838 flags, read from its parser)."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from megatron.train.arguments import parse_args
from megatron.train.arguments.flag import Flag, Switch
from megatron.train.arguments.tables import GROUPS, extras, flags, flags_by_dest

MODEL_OPT = (
    "--export-kd-cfg",
    "--export-kd-teacher-load",
    "--export-te-mcore-model",
    "--export-force-local-attention",
)
# Defaults that Megatron builds from enums; ours are their names, or the standard library's enum.
SPELLED = {"<AttnBackend.auto: 5>": "'auto'", "<Signals.SIGTERM: 15>": "<Signals.SIGTERM: 15>"}
DEVIATIONS = ("--distributed-backend", "--transformer-impl")


@cache
def megatron() -> tuple[dict[str, str], ...]:
    with open(Path(__file__).with_name("megatron_flags.tsv"), newline="") as file:
        return tuple(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


@cache
def ours() -> dict[str, Flag]:
    return {spelling: flag for flag in flags() for spelling in flag.spellings}


def test_every_megatron_flag_is_declared_once() -> None:
    names = [row["flags"].split(",")[0] for row in megatron()]
    assert len(names) == 838
    declared = [flag.name for flag in flags()]
    assert len(set(declared)) == len(declared)
    added = {flag.name for flag in extras.FLAGS} | set(MODEL_OPT)
    assert set(declared) - added == set(names)
    assert not added & set(names)


def test_flags_have_megatrons_signature() -> None:
    wrong = [f"{row['flags']}: {problem}" for row in megatron() for problem in _differences(row)]
    assert not wrong, "\n".join(wrong)


def _differences(row: dict[str, str]) -> Iterator[str]:
    name, *aliases = row["flags"].split(",")
    flag = ours()[name]
    kind = flag.type
    if flag.dest != row["dest"]:
        yield f"destination {flag.dest}, not {row['dest']}"
    default = "'auto'" if name in DEVIATIONS else SPELLED.get(row["default"], row["default"])
    if repr(flag.default) != default:
        yield f"default {flag.default!r}, not {default}"
    if row["nargs"] == "0":
        if kind is not {"store_true": Switch.ON, "store_false": Switch.OFF}.get(row["action"], Switch.TOGGLE):
            yield f"{kind}, not {row['action']}"
    elif str(flag.nargs) != row["nargs"]:
        yield f"nargs {flag.nargs}, not {row['nargs']}"
    elif (
        row["type"] in ("int", "float", "str")
        and kind is not {"int": int, "float": float, "str": str}[row["type"]]
    ):
        yield f"type {kind}, not {row['type']}"
    if kind is not Switch.TOGGLE and not set(aliases) <= set(flag.spellings):
        yield f"aliases {flag.aliases}, not {aliases}"
    if row["choices"] and name != "--exit-signal":
        missing = set(row["choices"].split(",")) - {str(choice) for choice in flag.choices or ()}
        if missing:
            yield f"choices lack {missing}"


def test_every_spelling_parses() -> None:
    # All first spellings in one command line, then all second ones.
    for place in (0, 1):
        spellings = [row["flags"].split(",")[place] for row in megatron() if row["flags"].count(",") >= place]
        named = {name: ours().get(name) or ours()["--" + name.removeprefix("--no-")] for name in spellings}
        parsed = parse_args([word for name, flag in named.items() for word in (name, *_sample(flag))])
        for name, flag in named.items():
            assert flag.dest in parsed.explicit, name
            if isinstance(flag.type, Switch) and len(flags_by_dest()[flag.dest]) == 1:
                off = name.startswith("--no-") if flag.type is Switch.TOGGLE else not flag.given_value
                assert getattr(parsed, flag.dest) is not off, name


def _sample(flag: Flag) -> list[str]:
    if isinstance(flag.type, Switch):
        return []
    if flag.choices:
        word = str(flag.choices[0])
    elif flag.dest == "exit_signal":
        word = "SIGUSR1"
    elif flag.dest == "yaml_cfg":
        word = "/dev/null"
    else:
        word = {int: "3", float: "0.5"}.get(flag.type, "1")  # type: ignore[call-overload]
    return [word] * (flag.nargs if isinstance(flag.nargs, int) else 1)


def test_defaults_without_words() -> None:
    parsed = vars(parse_args([]))
    assert parsed.pop("explicit") == frozenset()
    assert set(parsed) == set(flags_by_dest())
    for dest, value in parsed.items():
        assert value in [flag.default for flag in flags_by_dest()[dest]]


def test_every_flag_that_does_not_work_says_why() -> None:
    for flag in flags():
        if flag.status != "works":
            assert len(flag.reason) > 8, flag.name
        else:
            assert flag.help, flag.name


def test_groups_hold_every_flag() -> None:
    assert sum(len(members) for members in GROUPS.values()) == len(flags()) == 842 + len(extras.FLAGS)
