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
    if isinstance(flag.type, Switch) and flag.type is not Switch.TOGGLE and value is not flag.given_value:
        return False  # two switches may share a destination: the one whose value it is was given
    return value != flag.default and value is not None


def refusals(arguments: Namespace) -> list[str]:
    """One phrase for all flags that cannot be had for one reason, with what to use instead."""
    reasons: dict[str, list[str]] = {}
    for flag in flags():
        if not is_given(flag, arguments):
            continue
        value = getattr(arguments, flag.dest)
        if flag.status == "refused" and value not in flag.also_accepted:
            reasons.setdefault(f"not supported: {flag.reason}", []).append(spelled(flag, value))
        for item in value if isinstance(value, list) else [value]:
            reason = dict(flag.refused_values).get(item)
            if reason is not None:
                reasons.setdefault(f"not built: {reason}", []).append(f"{flag.name} {item}")
    return [
        f"{', '.join(given)} {'are' if len(given) > 1 else 'is'} {reason}"
        for reason, given in reasons.items()
    ]


def notes(arguments: Namespace) -> list[str]:
    """One line for each given flag that has no effect here."""
    return [
        f"{spelled(flag, getattr(arguments, flag.dest))} has no effect: {flag.reason}"
        for flag in flags()
        if flag.status == "no_op" and is_given(flag, arguments)
    ]
