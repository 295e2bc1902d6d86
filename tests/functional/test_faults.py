"""Planted faults are caught by the functional cases named here: else the cases would prove nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.functional import faults, runs
from tests.functional.cases import Case, all_cases, load


def caught_by(fault: str) -> Case:
    """The case in which a fault must be felt: the named one, or the smallest that has what the fault needs."""
    if fault in faults.NAMED:
        return load(faults.NAMED[fault])
    fits = [
        case
        for case in all_cases()
        if case.features
        and case.precision == "fp32"
        and all(case.features[axis] in values for axis, values in faults.NEEDS[fault].items())
    ]
    assert fits, f"no fp32 case has what {fault} needs"
    return min(
        fits, key=lambda case: (sum(launch.ranks for launch in case.launches), case.cpu_hooks, case.name)
    )


def hook(fault: str) -> str:
    return f"tests.functional.faults:{fault}"


@pytest.mark.parametrize("fault", faults.FAULTS)
def test_a_planted_fault_is_caught(fault: str) -> None:
    """Golden values and the one-rank run (or the resume) both tell, the latter on any machine."""
    case = caught_by(fault)
    found = runs.faults_of(case, runs.case_in_pool(case, hook(fault)))
    other = "resume" if case.no_one_rank else "one rank"
    assert [line for line in found if line.startswith(other)], f"{case.name} does not feel {fault}"
    if other == "one rank":
        assert [line for line in found if line.startswith("golden")], (
            f"{case.name}: golden values let {fault} pass"
        )
    if not case.default:  # those are run without a fault by test_cases.py
        assert runs.faults_of(case, runs.case_in_pool(case)) == [], f"{case.name} fails without the fault"


@pytest.mark.full
@pytest.mark.parametrize("fault", [fault for fault in faults.FAULTS if fault not in faults.NAMED])
def test_a_planted_fault_is_caught_in_a_launch(fault: str, tmp_path: Path) -> None:
    case = caught_by(fault)
    assert runs.faults_of(case, runs.launched(case, tmp_path / "run", hook(fault)))
