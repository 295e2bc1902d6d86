"""Chooses the functional cases so that every pair of features meets in one of them; writes cases and their table.

    python -m tests.functional.cover            print what would be chosen
    python -m tests.functional.cover --write    write test_cases/*/*/model_config.yaml and docs/functional_cases.md
    python -m tests.functional.cover --check    exit with 1 where either differs from what is there

The choice is greedy and seeded, hence the same in every run. It begins with STARTS. Case files without the line
"Written by" are written by hand and left alone.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml

from tests.functional.features import (
    AXES,
    DEFAULTS,
    MAX_RANKS,
    RULES,
    SCRIPTS,
    STEPS,
    Cell,
    Sizes,
    possible,
    resharded,
    run_flags,
)

ROOT = Path(__file__).resolve().parents[2]
CASES = ROOT / "tests" / "functional" / "test_cases"
TABLE = ROOT / "docs" / "functional_cases.md"
SEED, ATTEMPTS = 6, 60
DEFAULT_RANKS = 4
WEIGHT_OF_RANKS = 0.7
NUM_CASES = 42
"""At least; where the pairs need less, more triples are covered, on DEFAULT_RANKS ranks."""
STARTS: tuple[dict[str, str], ...] = ({"zero": "zero1"}, {"zero": "zero3", "tensor": "tp2-sp"})
"""Plain cases, in which little can hide: what they have beside the first value of every axis."""
TE_HOOK = "tests.functional.hooks:transformer_engine_on_cpu"
Pair = tuple[tuple[str, str], tuple[str, str]]


def items_of(cell: Cell) -> list[tuple[str, str]]:
    """(axis, value) in the order of the axes."""
    return [(axis, cell[axis]) for axis in AXES if axis in cell]


def tuples_of(cell: Cell, size: int) -> set[tuple[tuple[str, str], ...]]:
    """All combinations of `size` of a cell's values."""
    return set(itertools.combinations(items_of(cell), size))


def possible_pairs() -> tuple[set[Pair], dict[Pair, str]]:
    """(pairs that can meet, the others with the reason)."""
    can: set[Pair] = set()
    cannot: dict[Pair, str] = {}
    for first, second in itertools.combinations(AXES, 2):
        for pair in itertools.product(AXES[first], AXES[second]):
            cell = {first: pair[0], second: pair[1]}
            key: Pair = ((first, pair[0]), (second, pair[1]))
            broken = [rule.reason for rule in RULES if rule.forbids(cell)]
            if broken:
                cannot[key] = broken[0]
            elif completed(cell, random.Random(0)) is None:
                cannot[key] = f"no run of these two fits on {MAX_RANKS} ranks"
            else:
                can.add(key)
    return can, cannot


def completed(
    cell: Cell, rng: random.Random, wanted: set[Any] | None = None, max_ranks: int = MAX_RANKS
) -> dict[str, str] | None:
    """A whole cell around a partial one, each value chosen for the most `wanted` pairs; None where there is none."""
    if not possible(cell):
        return None
    rest = [axis for axis in AXES if axis not in cell]
    rng.shuffle(rest)
    return _fill(dict(cell), rest, rng, wanted or set(), max_ranks)


def _fill(
    cell: dict[str, str], rest: list[str], rng: random.Random, wanted: set[Any], max_ranks: int
) -> dict[str, str] | None:
    if Sizes.of(cell).world > max_ranks:
        return None
    if not rest:
        return cell
    axis, others = rest[0], rest[1:]

    def gain(value: str) -> tuple[int, float]:
        new = {**cell, axis: value}
        order = sorted(new, key=list(AXES).index)
        me = (axis, value)
        pairs = (((a, new[a]), me) if order.index(a) < order.index(axis) else (me, (a, new[a])) for a in cell)
        return sum(pair in wanted for pair in pairs), (value == "regular") + rng.random()

    for value in sorted(AXES[axis], key=gain, reverse=True):
        trial = {**cell, axis: value}
        if possible(trial):
            found = _fill(trial, others, rng, wanted, max_ranks)
            if found is not None:
                return found
    return None


def choose() -> tuple[list[dict[str, str]], int]:
    """(all cells, how many of them, from the first on, make the default run)."""
    rng = random.Random(SEED)
    singles = {item for axis in AXES for item in ((axis, value) for value in AXES[axis])}
    missing, _ = possible_pairs()
    chosen = [{**DEFAULTS, **start} for start in STARTS]
    for cell in chosen:
        singles -= set(items_of(cell))
        missing -= tuples_of(cell, 2)
    while singles:
        # A resume is a second launch: no more of them than are needed.
        cheap = {pair for pair in missing if pair[1][0] != "type"}
        cell = _best(singles, lambda cell: set(items_of(cell)), rng, cheap, DEFAULT_RANKS)
        chosen.append(cell)
        singles -= set(items_of(cell))
        missing -= tuples_of(cell, 2)
    num_default = len(chosen)
    while missing:
        cell = _best(missing, lambda cell: tuples_of(cell, 2), rng, missing)
        chosen.append(cell)
        missing -= tuples_of(cell, 2)
    seen = set().union(*(tuples_of(cell, 3) for cell in chosen))
    while len(chosen) < NUM_CASES:
        cell = max(_random_cells(rng), key=lambda cell: len(tuples_of(cell, 3) - seen))
        chosen.append(cell)
        seen |= tuples_of(cell, 3)
    return chosen, num_default


def _best(
    missing: set[Any],
    parts: Callable[[Cell], set[Any]],
    rng: random.Random,
    pairs: set[Any],
    max_ranks: int = MAX_RANKS,
) -> dict[str, str]:
    """The cell of ATTEMPTS, each begun with something `missing`, whose `parts` hold the most of that for its ranks."""
    pool = sorted(missing)
    candidates = []
    for _ in range(ATTEMPTS):
        seed = rng.choice(pool)
        start = dict([seed] if isinstance(seed[0], str) else seed)
        cell = completed(start, rng, pairs, max_ranks)
        if cell is not None:
            candidates.append(cell)
    return max(
        candidates, key=lambda cell: len(parts(cell) & missing) / Sizes.of(cell).world ** WEIGHT_OF_RANKS
    )


def _random_cells(rng: random.Random) -> Iterable[dict[str, str]]:
    for _ in range(ATTEMPTS):
        axis = rng.choice(list(AXES))
        cell = completed({axis: rng.choice(AXES[axis])}, rng, max_ranks=DEFAULT_RANKS)
        if cell is not None:
            yield cell


def name_of(cell: Cell) -> str:
    """Folder of a case: its model and what is not the default."""
    skipped = ("model", "dispatcher")
    parts = [value for axis, value in items_of(cell) if axis not in skipped and value != DEFAULTS[axis]]
    if cell["dispatcher"] == "allgather":
        parts.append("moe-allgather")
    return f"{cell['model']}/" + ("-".join(parts).replace("+", "-") or "plain")


def config_of(cell: Cell, default: bool) -> dict[str, Any]:
    """What model_config.yaml holds."""
    kind = cell["type"]
    config: dict[str, Any] = {
        "FEATURES": dict(items_of(cell)),
        "DEFAULT": default,
        "TEST_TYPE": kind,
        "SCRIPT": SCRIPTS[cell["model"]],
        "RANKS": Sizes.of(cell).world,
        "ENV_VARS": {"OMP_NUM_THREADS": 1},
        "MODEL_ARGS": run_flags(cell),
        "METRICS": metrics_of(cell),
    }
    if cell["backend"] == "te":
        config["CPU_HOOKS"] = TE_HOOK
    if kind == "regular":
        return config
    half = STEPS[kind] // 2
    config["MODEL_ARGS"] |= {"--save": "{output}/checkpoints", "--save-interval": half}
    second = run_flags(resharded(cell)) if kind == "reshard-resume" else run_flags(cell)
    config["MODEL_ARGS_2"] = second | {"--load": "{output}/checkpoints", "--ckpt-step": half}
    if kind == "reshard-resume":
        config["RANKS_2"] = Sizes.of(resharded(cell)).world
    return config


def metrics_of(cell: Cell) -> list[str]:
    """Names of the metrics that a case records."""
    metrics = ["lm loss", "grad-norm", "num-zeros"]
    if cell["model"] == "mixtral":
        metrics.append("load balancing loss")
    if cell["model"] == "deepseek":
        metrics += ["mtp loss", "seq load balancing loss"]
    return [*metrics, "iteration-time", "mem-peak"]


def files() -> dict[Path, str]:
    """Every generated file with its content."""
    cells, num_default = choose()
    found: dict[Path, str] = {}
    for index, cell in enumerate(cells):
        text = yaml.safe_dump(config_of(cell, index < num_default), sort_keys=False, width=110)
        path = CASES / name_of(cell) / "model_config.yaml"
        assert path not in found, f"two cases are called {name_of(cell)}"
        found[path] = f"# Written by python -m tests.functional.cover --write; do not edit.\n{text}"
    found[TABLE] = table(cells, num_default)
    return found


def table(cells: list[dict[str, str]], num_default: int) -> str:
    """docs/functional_cases.md."""
    can, cannot = possible_pairs()
    met = set().union(*(tuples_of(cell, 2) for cell in cells))
    holes = sorted(can - met)
    triples = set().union(*(tuples_of(cell, 3) for cell in cells))
    lines = [
        "# Functional cases",
        "",
        "Written by `python -m tests.functional.cover --write`, checked by `tests/functional/test_cover.py`.",
        "How to run and renew them: [testing.md](testing.md).",
        "",
        f"{len(cells)} generated cases; every one of the {len(can)} pairs of feature values that can meet does so",
        f"in at least one of them, and {len(triples)} triples. Holes: {', '.join(map(str, holes)) or 'none'}.",
        "",
        "## Cases",
        "",
        "The default run takes those marked with a star: each value of each feature at least once, on up to "
        f"{DEFAULT_RANKS} ranks.",
        "",
        "| case | ranks | " + " | ".join(AXES) + " |",
        "|---|---|" + "---|" * len(AXES),
    ]
    for index, cell in enumerate(cells):
        star = "* " if index < num_default else ""
        values = " | ".join(cell[axis] for axis in AXES)
        lines.append(f"| {star}{index + 1} | {Sizes.of(cell).world} | {values} |")
    lines += ["", "Folders below `tests/functional/test_cases/`, by number:", ""]
    lines += [f"{index + 1}. {name_of(cell)}" for index, cell in enumerate(cells)]
    lines += ["", "Beside them, written by hand (each file says why): " + ", ".join(_by_hand()) + "."]
    lines += ["", "## In how many cases each pair meets", ""]
    for first, second in itertools.combinations(AXES, 2):
        lines += _pair_table(cells, first, second, cannot)
    lines += ["## Pairs that cannot meet", "", "| pair | reason |", "|---|---|"]
    lines += [f"| {a[1]} with {b[1]} | {reason} |" for (a, b), reason in cannot.items()]
    return "\n".join(lines) + "\n"


def _by_hand() -> list[str]:
    paths = sorted(CASES.glob("*/*/model_config.yaml"))
    return [
        str(path.parent.relative_to(CASES))
        for path in paths
        if not path.read_text().startswith("# Written by")
    ]


def _pair_table(cells: list[dict[str, str]], first: str, second: str, cannot: dict[Pair, str]) -> list[str]:
    lines = [
        f"| {first} / {second} | " + " | ".join(AXES[second]) + " |",
        "|---|" + "---|" * len(AXES[second]),
    ]
    for one in AXES[first]:
        row = []
        for other in AXES[second]:
            count = sum(cell[first] == one and cell[second] == other for cell in cells)
            row.append("-" if ((first, one), (second, other)) in cannot else str(count))
        lines.append(f"| {one} | " + " | ".join(row) + " |")
    return [*lines, ""]


def differences(wanted: dict[Path, str]) -> list[str]:
    """One line for each generated file that is missing, different or no longer wanted."""
    lines = []
    for path, text in wanted.items():
        if not path.exists():
            lines.append(f"{path.relative_to(ROOT)} is missing")
        elif path.read_text() != text:
            lines.append(f"{path.relative_to(ROOT)} differs")
    for path in CASES.glob("*/*/model_config.yaml"):
        if path not in wanted and path.read_text().startswith("# Written by"):
            lines.append(f"{path.relative_to(ROOT)} is not chosen any more")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    wanted = files()
    found = differences(wanted)
    if options.write:
        for path in CASES.glob("*/*/model_config.yaml"):
            if path not in wanted and path.read_text().startswith("# Written by"):
                path.unlink()
        for path, text in wanted.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    print("\n".join(found) or "cases and table are as chosen")
    return int(options.check and bool(found))


if __name__ == "__main__":
    sys.exit(main())
