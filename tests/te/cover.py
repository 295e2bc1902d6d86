"""A small set of cells of a grid in which every pair of values of every two axes occurs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Cell = dict[str, Any]


def full_product(axes: Mapping[str, Sequence[Any]], possible: Callable[[Cell], bool]) -> list[Cell]:
    """All possible cells of the grid."""
    cells = (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))
    return [cell for cell in cells if possible(cell)]


def pair_cover(axes: Mapping[str, Sequence[Any]], possible: Callable[[Cell], bool]) -> list[Cell]:
    """Possible cells, chosen greedily, that hold every pair of values which occurs in any possible cell."""
    cells = full_product(axes, possible)
    pairs_of = [set(itertools.combinations(cell.items(), 2)) for cell in cells]
    missing = set().union(*pairs_of)
    chosen = []
    while missing:
        best = max(range(len(cells)), key=lambda index: len(pairs_of[index] & missing))
        missing -= pairs_of[best]
        chosen.append(cells[best])
    return chosen


def name_of(cell: Cell) -> str:
    """For pytest's ids and for messages."""
    return "-".join(str(value) for value in cell.values())
