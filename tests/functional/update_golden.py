"""Renews golden values and shows what moved: scripts/update_golden.sh [CASE...] calls this.

Runs every case (in the warm worker pools; --launch: as a user starts it), twice the first time where nothing is stored,
and refuses to store what differs between two runs, from the case's one-rank run, or between a run and its resume.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.functional import check, golden, runs
from tests.functional.cases import Case, all_cases, load
from tests.functional.golden import Metrics
from tests.pool import close_all_pools


def moved(case: Case, found: Metrics, platform: str) -> list[str]:
    """One line a metric that moved: by how much at most, and at which step first."""
    path = golden.path_of(case.folder, platform)
    if not path.exists():
        return ["new"]
    before, recorded = golden.load(path)
    lines = []
    for name in sorted(set(before) | set(found)):
        if name in golden.OBSERVED:
            continue
        if name not in before or name not in found:
            lines.append(f"{name}: {'new' if name in found else 'gone'}")
            continue
        faults = golden.compare({name: before[name]}, found, None)
        if faults:
            worst = max(faults, key=lambda fault: fault.relative)
            lines.append(
                f"{name}: first at step {faults[0].step}, at most {worst.relative:.2e} (step {worst.step}: "
                f"{worst.expected:.8g} -> {worst.found:.8g}) since {recorded.get('commit')}"
            )
    return lines


def renew(case: Case, options: argparse.Namespace) -> tuple[bool, list[str]]:
    """(whether all is well, lines to print)."""
    results = [_run(case, options) for _ in range(1 if options.once else 2)]
    faults = golden.compare(results[0][0], results[-1][0], None)
    lines = [f"two runs differ: {fault}" for fault in faults]
    one_rank = None if options.platform == "gpu" else runs.one_rank(case)
    lines += check.one_rank_faults(case, results[0][0], one_rank) if one_rank else []
    if len(results[0]) > 1:
        lines += check.resume_faults(case, *results[0])
    if lines and not options.force:
        return False, lines
    changes = moved(case, results[0][0], options.platform)
    path = golden.path_of(case.folder, options.platform)
    recorded = golden.here(golden.threads_of(case.environment), options.platform)
    recorded["runs"] = len(results)
    if (changes or not _as_well_known(path, recorded)) and not options.diff:
        golden.save(path, results[0][0], recorded)
    return True, [*lines, *(changes or ["unchanged"])]


def _as_well_known(path: Path, recorded: dict[str, Any]) -> bool:
    """Whether what is stored was made in the same place by as many runs: equal numbers need not be stored again."""
    _, before = golden.load(path)
    here = all(before.get(key) == recorded.get(key) for key in golden.SAME)
    return here and before.get("runs", 2) >= recorded["runs"]


def _run(case: Case, options: argparse.Namespace) -> list[Metrics]:
    if not options.launch:
        return runs.case_in_pool(case)
    with tempfile.TemporaryDirectory() as folder:
        return runs.launched(case, Path(folder) / "run", platform=options.platform)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("cases", nargs="*", help="folders below tests/functional/test_cases (default: all)")
    parser.add_argument("--diff", action="store_true", help="show what moved, store nothing")
    parser.add_argument(
        "--launch", action="store_true", help="start each run as a user does, not in the warm pool"
    )
    parser.add_argument("--platform", choices=("cpu", "gpu"), default="cpu", help="gpu implies --launch")
    parser.add_argument("--once", action="store_true", help="do not run each case twice")
    parser.add_argument("--force", action="store_true", help="store also what differs from one rank")
    options = parser.parse_args()
    options.launch |= options.platform == "gpu"
    good = True
    try:
        chosen = [load(name) for name in options.cases] or list(all_cases())
        for case in chosen:
            well, lines = _attempt(case, options)
            good &= well
            for line in lines:
                print(f"{'' if well else 'FAILED '}{case.name}: {line}", flush=True)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        close_all_pools()
    return int(not good)


def _attempt(case: Case, options: argparse.Namespace) -> tuple[bool, list[str]]:
    try:
        return renew(case, options)
    except Exception as error:  # the other cases are still worth a run
        return False, [f"{type(error).__name__}: {str(error).strip()[-1500:]}"]


if __name__ == "__main__":
    sys.exit(main())
