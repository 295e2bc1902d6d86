"""--use-checkpoint-args: what a checkpoint says of the model, where the user says nothing.

Precedence: what the user gave, then the checkpoint, then the default. Every difference is told. Sizes of the run
(ranks, batches, steps) are never taken over.
"""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from megatron.train.arguments.tables import flags_by_dest, mla, model, moe, positions, tokenizer
from megatron.train.checkpoint import find_checkpoint, latest_iteration, read_record

# Of those tables, what says how a model is made or computed at the start rather than what it is.
_NOT_THE_MODEL = frozenset(
    {
        "attention_dropout",
        "hidden_dropout",
        "init_method_std",
        "embedding_init_method_std",
        "make_vocab_size_divisible_by",
        "pad_vocab_size",
        "padded_vocab_size",
    }
)


def model_destinations() -> tuple[str, ...]:
    """Destinations that describe the model and its tokenizer."""
    working = (flag for table in (model, positions, mla, moe, tokenizer) for flag in table.FLAGS)
    return tuple(flag.dest for flag in working if flag.status == "works" and flag.dest not in _NOT_THE_MODEL)


def complete_from_checkpoint(arguments: Namespace) -> tuple[Namespace, list[str]]:
    """With --use-checkpoint-args: what --load's checkpoint says of the model. Reads one small file, starts nothing.

    Where that file is damaged, the newest whole checkpoint's, which --load will fall back to.

    Returns: (arguments, one line for each difference). Raises ValueError for a checkpoint that cannot be read.
    """
    if not arguments.use_checkpoint_args or arguments.load is None:
        return arguments, []
    step = arguments.ckpt_step
    try:
        iteration = latest_iteration(arguments.load) if step is None else step
        if iteration is not None:
            return with_saved_arguments(arguments, read_record(arguments.load, iteration).arguments)
    except ValueError:
        if step is not None:
            raise
    found = find_checkpoint(arguments.load)
    if found is None:
        return arguments, []
    return with_saved_arguments(arguments, read_record(arguments.load, found.iteration).arguments)


def with_saved_arguments(arguments: Namespace, saved: Mapping[str, Any]) -> tuple[Namespace, list[str]]:
    """Arguments completed from a checkpoint's (TrainConfig.as_dict of the run that saved it).

    Returns: (arguments, one line for each difference). What was explicit stays explicit, and nothing else becomes it.
    """
    result, lines = copy.deepcopy(arguments), []
    for dest in model_destinations():
        if dest not in saved or (dest == "num_query_groups" and not saved.get("group_query_attention")):
            continue
        flag, value, here = flags_by_dest()[dest][0], saved[dest], getattr(arguments, dest)
        if value == here:
            continue
        if dest in arguments.explicit:
            lines.append(f"{flag.name}: {here} of the command line, although the checkpoint has {value}")
        else:
            setattr(result, dest, value)
            lines.append(f"{flag.name}: {value} of the checkpoint, instead of the default {here}")
    return result, lines
