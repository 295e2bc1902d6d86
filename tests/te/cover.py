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


def shared_cover(
    axes: Mapping[str, Sequence[Any]], names: Sequence[str], possible: Callable[[str, Cell], bool]
) -> dict[str, list[Cell]]:
    """A few cells for each name: every value occurs with every name, every pair of values with some name.

    As far as possible cells have them.
    """
    cells = {name: full_product(axes, lambda cell, name=name: possible(name, cell)) for name in names}
    pairs = {name: [set(itertools.combinations(cell.items(), 2)) for cell in cells[name]] for name in names}
    missing = set().union(*(pair for found in pairs.values() for pair in found))
    chosen: dict[str, list[Cell]] = {name: [] for name in names}

    def take(name: str, index: int) -> None:
        chosen[name].append(cells[name][index])
        missing.difference_update(pairs[name][index])

    for name in names:
        values = {item for cell in cells[name] for item in cell.items()}
        while values:
            gain = [
                (len(values & cell.items()), len(found & missing))
                for cell, found in zip(cells[name], pairs[name], strict=True)
            ]
            best = gain.index(max(gain))
            values -= cells[name][best].items()
            take(name, best)
    while missing:
        name, index = max(
            ((name, index) for name in names for index in range(len(cells[name]))),
            key=lambda at: len(pairs[at[0]][at[1]] & missing),
        )
        take(name, index)
    return chosen


def name_of(cell: Cell) -> str:
    """For pytest's ids and for messages."""
    return "-".join(str(value) for value in cell.values())
