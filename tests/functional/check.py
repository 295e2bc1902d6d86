"""Compares what a case's runs have reported with what they should have.

    python -m tests.functional.check CASE --output FOLDER [--platform cpu|gpu]

for the metrics files that run_case.sh left in FOLDER. Prints what differs; status 1 if anything does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.functional import golden
from tests.functional.cases import ROOT, Case, load
from tests.functional.golden import Metrics

ONE_RANK_FOLDER = ROOT / "runs" / "functional" / "one_rank"
SOURCES = ("megatron", "pretrain_gpt.py", "pretrain_deepseek.py")


def one_rank_path(case: Case) -> Path:
    """Where the case's one-rank run is kept: by the hash of its arguments, of the sources and of where it was made."""
    return ONE_RANK_FOLDER / f"{case.one_rank_key}-{_digest(case)}.jsonl"


def _digest(case: Case) -> str:
    here = golden.here(golden.threads_of(case.environment))
    places = {key: here[key] for key in golden.SAME}
    digest = hashlib.sha256(json.dumps([places, case.environment], sort_keys=True).encode())
    for name in SOURCES:
        top = ROOT / name
        for path in sorted(top.rglob("*.py")) if top.is_dir() else [top]:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def one_rank_metrics(case: Case) -> Metrics:
    """The numbers of the case's one-rank run, which is launched if it has not been yet."""
    path = one_rank_path(case)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        launch = case.one_rank
        command = [sys.executable, launch.script, *launch.words, "--metrics-file", str(unfinished)]
        environment = {**os.environ, **case.environment}
        subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
        unfinished.replace(path)
    return golden.read_metrics(path, case.metrics)


def keep_one_rank(case: Case, lines: Iterable[dict[str, float]]) -> None:
    """Keep the lines of a one-rank run that was made elsewhere (the worker pool)."""
    path = one_rank_path(case)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text("".join(json.dumps(line) + "\n" for line in lines))
    unfinished.replace(path)


def golden_faults(case: Case, found: Metrics, platform: str = "cpu") -> list[str]:
    """What differs from the golden file."""
    path = golden.path_of(case.folder, platform)
    if not path.exists():
        return [f"{path.relative_to(ROOT)} is missing: scripts/update_golden.sh {case.name} makes it"]
    expected, recorded = golden.load(path)
    now = golden.here(golden.threads_of(case.environment), platform)
    exact = golden.same_place(recorded, now)
    faults = golden.compare(expected, found, None if exact else case.precision)
    what = "golden (exact)" if exact else f"golden (of {recorded['platform']})"
    thin = [
        f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path} lacks {lack}: "
        f"scripts/update_golden.sh {case.name} records it"
        for lack in golden.lacking(expected, found)
    ]
    return [*(f"{what}: {fault}" for fault in faults), *thin]


def one_rank_faults(case: Case, found: Metrics, expected: Metrics) -> list[str]:
    """What differs from the one-rank run."""
    if case.no_one_rank:
        return []
    steps = next(iter(found.values()))
    expected = {
        name: {step: value for step, value in series.items() if step in steps}
        for name, series in expected.items()
    }
    return [f"one rank: {fault}" for fault in golden.compare(expected, found, case.precision)]


def resume_faults(case: Case, whole: Metrics, rest: Metrics) -> list[str]:
    """What the resumed run has otherwise than the uninterrupted one: nothing, or within tolerances if resharded."""
    first = min(min(series) for series in rest.values())
    expected = {
        name: {step: value for step, value in series.items() if step >= first}
        for name, series in whole.items()
    }
    steps = len(next(iter(expected.values())))
    if first == 1 or not steps:
        return [f"resume: the second run reports from step {first} on: it has not resumed"]
    precision = case.precision if case.test_type == "reshard-resume" else None
    return [f"resume: {fault}" for fault in golden.compare(expected, rest, precision)]


def case_faults(
    case: Case, runs: list[Metrics], one_rank: Metrics | None, platform: str = "cpu"
) -> list[str]:
    """All that is wrong with a case's runs. one_rank: None where the case has none."""
    faults = golden_faults(case, runs[0], platform)
    if one_rank is not None:
        faults += one_rank_faults(case, runs[0], one_rank)
    if len(runs) > 1:
        faults += resume_faults(case, runs[0], runs[1])
    return faults


def read_runs(case: Case, output: Path) -> list[Metrics]:
    """The metrics of the case's runs, from run_case.sh's folder."""
    numbers = range(1, len(case.launches) + 1)
    return [golden.read_metrics(output / f"metrics_{number}.jsonl", case.metrics) for number in numbers]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("case")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--platform", choices=("cpu", "gpu"), default="cpu")
    options = parser.parse_args()
    case = load(options.case)
    one_rank = None if case.no_one_rank else one_rank_metrics(case)
    faults = case_faults(case, read_runs(case, options.output), one_rank, options.platform)
    print("\n".join(f"{case.name}: {line}" for line in faults or ["as it should be"]))
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
