"""From a parsed namespace to a frozen TrainConfig, or to one line that says what is wrong."""

from __future__ import annotations

import copy
from argparse import Namespace

from megatron.models.config import ModelConfig
from megatron.train.arguments.experts import missing_library
from megatron.train.arguments.limits import check_limits
from megatron.train.arguments.ranges import check_ranges
from megatron.train.arguments.refuse import notes, refusals
from megatron.train.arguments.resolve import Context, default_device, resolve
from megatron.train.arguments.rules import check_rules
from megatron.train.config import TrainConfig


def validate(arguments: Namespace, world_size: int, device: str | None = None) -> TrainConfig:
    """Checks and resolves arguments for a number of ranks. Starts nothing, changes nothing that it is given.

    arguments: from parse_args. world_size: ranks of the whole run. device: "cpu" or "cuda"; None: what
    torch sees.

    Raises ValueError with one line: a flag that is not built or not supported (with the reason and what to
    use instead), flags that contradict or need each other, values missing, out of range or not dividing. The
    result's `warnings` and `notes` are for rank 0's log.
    """
    arguments = copy.deepcopy(arguments)
    refused = refusals(arguments)
    if refused:
        raise ValueError("; ".join(refused))
    without_effect = notes(arguments)
    context = Context(world_size, device or default_device())
    missing = missing_library(arguments)
    if missing and arguments.validate_only:  # the run may start on other machines
        context.warnings.append(missing)
    config = _checked(arguments, context, without_effect)
    if missing and not arguments.validate_only:
        raise ValueError(missing)
    # The model's own rules, before any process group exists; its vocabulary may not be known yet.
    ModelConfig.from_arguments(config if config.vocab_size else config.replace(vocab_size=1))
    return config


def check_and_resolve(arguments: Namespace, world_size: int, device: str = "cpu") -> TrainConfig:
    """validate() without refusals: the rules of what is refused are tested with it."""
    return _checked(copy.deepcopy(arguments), Context(world_size, device), [])


def _checked(arguments: Namespace, context: Context, without_effect: list[str]) -> TrainConfig:
    if context.world_size < 1:
        raise ValueError(f"a world of {context.world_size} ranks: WORLD_SIZE must be 1 or more")
    check_rules(arguments)
    check_ranges(arguments)  # before a number out of range is derived from
    resolve(arguments, context)
    check_limits(arguments)
    values = dict(vars(arguments))
    explicit = values.pop("explicit")
    return TrainConfig(values, explicit, tuple(context.warnings), tuple(without_effect))
