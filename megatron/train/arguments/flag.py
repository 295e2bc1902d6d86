"""One command-line flag as plain data: what it is called, what it takes, and what becomes of it here.

Names, types, defaults, destinations and aliases are Megatron-LM's, so that its launch scripts parse
unchanged. The status says honestly what happens with a value:

works     read by the file in `read_by`; `test` names the test that fails without it.
no_op     accepted and without effect here, for a stated reason (one line in the log when given).
refused   accepted at its default only; another value is refused by name; the reason says what to use instead.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Status = Literal["works", "no_op", "refused"]


class Switch(enum.Enum):
    """A flag without a value."""

    ON = "store_true"  # given: True
    OFF = "store_false"  # given: False
    TOGGLE = "toggle"  # --x and --no-x


ValueType = Callable[[str], object]


@dataclass(frozen=True)
class Flag:
    """A declared flag.

    name: spelled with its dashes. aliases: other spellings, same meaning.
    type: what turns one word into a value, or a Switch for a flag without one.
    nargs: as in argparse (None: one value; an int, "*" or "+": a list).
    choices: the values that Megatron allows, after conversion.
    dest: attribute name; made from the name when empty, as argparse does.
    help: what it does here (works). reason: why it does nothing or is refused, and what to use instead.
    read_by, test: paths from the repository's root, for flags that work.
    refused_values: (value, reason) pairs that cannot be had (yet) of a flag that works or is a no-op.
    also_accepted: values beside the default that ask for nothing, of a flag that is not there.
    """

    name: str
    type: ValueType | Switch
    default: object
    status: Status
    help: str = ""
    reason: str = ""
    nargs: int | str | None = None
    choices: tuple[object, ...] | None = None
    aliases: tuple[str, ...] = ()
    dest: str = ""
    read_by: str = ""
    test: str = ""
    refused_values: tuple[tuple[object, str], ...] = ()
    also_accepted: tuple[object, ...] = ()

    def __post_init__(self) -> None:
        if not self.dest:
            object.__setattr__(self, "dest", self.name.lstrip("-").replace("-", "_"))
        assert self.name.startswith("--"), self.name
        assert (self.status == "works") == (not self.reason), (
            f"{self.name}: a reason is for what does not work"
        )
        known = self.help and self.read_by and self.test
        assert self.status != "works" or known, f"{self.name}: no help, reader or test"

    @property
    def spellings(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @property
    def given_value(self) -> object:
        """The value that a switch takes when it is given."""
        assert isinstance(self.type, Switch), self.name
        return self.type is not Switch.OFF


def works(
    name: str, type: ValueType | Switch, default: object, help: str, read_by: str, **options: object
) -> Flag:
    """A flag that is read. `read_by` and `test` are given without their roots (megatron/, tests/unit/)."""
    test = options.pop("test", "")
    return Flag(
        name,
        type,
        default,
        "works",
        help=help,
        read_by=f"megatron/{read_by}",
        test=f"tests/unit/{test}" if test else "",
        **options,  # type: ignore[arg-type]
    )


def no_op(name: str, type: ValueType | Switch, default: object, reason: str, **options: object) -> Flag:
    """A flag that is accepted and has no effect, for `reason`."""
    return Flag(name, type, default, "no_op", reason=reason, **options)  # type: ignore[arg-type]


def refused(name: str, type: ValueType | Switch, default: object, reason: str, **options: object) -> Flag:
    """A flag of something that is not there, or that this project leaves to others."""
    return Flag(name, type, default, "refused", reason=reason, **options)  # type: ignore[arg-type]
