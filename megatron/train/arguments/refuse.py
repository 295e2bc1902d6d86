"""What is not built is refused by name; what has no effect is said once."""

from __future__ import annotations

from argparse import Namespace

from megatron.train.arguments.flag import Flag, Switch
from megatron.train.arguments.tables import flags


def spelled(flag: Flag, value: object) -> str:
    """A flag as the user wrote it."""
    if isinstance(flag.type, Switch):
        return flag.name
    if isinstance(value, list | tuple):
        return " ".join([flag.name, *map(str, value)])
    return f"{flag.name} {getattr(value, 'name', value)}"


def is_given(flag: Flag, arguments: Namespace) -> bool:
    """Whether the flag's destination has another value than this flag's default."""
    value = getattr(arguments, flag.dest)
    if isinstance(flag.type, Switch) and flag.type is not Switch.TOGGLE:
        # Two switches may share a destination: the one whose value it is was given.
        return flag.dest in arguments.explicit and value is flag.given_value
    return value != flag.default and value is not None


def refusals(arguments: Namespace) -> list[str]:
    """One phrase for each flag that cannot be had, with the reason and what to use instead."""
    result = []
    for flag in flags():
        if not is_given(flag, arguments):
            continue
        value = getattr(arguments, flag.dest)
        if flag.status in ("refused", "not_yet") and value not in flag.also_accepted:
            kind = "is not supported" if flag.status == "refused" else "is not built yet"
            result.append(f"{spelled(flag, value)} {kind}: {flag.reason}")
        for item in value if isinstance(value, list) else [value]:
            reason = dict(flag.refused_values).get(item)
            if reason is not None:
                result.append(f"{flag.name} {item} is not built: {reason}")
    return result


def notes(arguments: Namespace) -> list[str]:
    """One line for each given flag that has no effect here."""
    return [
        f"{spelled(flag, getattr(arguments, flag.dest))} has no effect: {flag.reason}"
        for flag in flags()
        if flag.status == "no_op" and is_given(flag, arguments)
    ]
