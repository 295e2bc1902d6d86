"""Functional cases: launched as a user launches them, held to golden values, to one rank, and to their own resume."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.functional import runs
from tests.functional.cases import ROOT, Case, all_cases, load, names

DEFAULT = [case for case in all_cases() if case.default]
REST = [case for case in all_cases() if not case.default]
WHOLE_SCRIPT = "gpt/dropout-ckpt-resume"


def hold(case: Case, output: Path) -> None:
    faults = runs.faults_of(case, runs.launched(case, output))
    assert not faults, "\n".join(faults[:20])


@pytest.mark.parametrize(
    "case", [case for case in DEFAULT if case.name != WHOLE_SCRIPT], ids=lambda case: case.name
)
def test_a_case_is_as_it_should_be(case: Case, tmp_path: Path) -> None:
    """O09 and, by features, P04, P08, P13, G10, K01, K13, K17."""
    hold(case, tmp_path / "run")


@pytest.mark.full
@pytest.mark.parametrize("case", REST, ids=lambda case: case.name)
def test_every_other_case_is_as_it_should_be(case: Case, tmp_path: Path) -> None:
    hold(case, tmp_path / "run")


def test_the_script_runs_and_compares(tmp_path: Path) -> None:
    """run_case.sh from beginning to end, as a developer calls it."""
    script = ROOT / "tests" / "functional" / "run_case.sh"
    command = [str(script), WHOLE_SCRIPT, "--output", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, cwd=ROOT)
    assert (done.returncode, done.stdout.strip()) == (0, f"{WHOLE_SCRIPT}: as it should be"), done.stderr[
        -3000:
    ]
    assert (tmp_path / "run" / "log_2.txt").read_text().count("loaded the checkpoint of iteration 2") == 1


def test_the_pool_gives_the_numbers_of_a_launch_twice() -> None:
    """O09: exactness itself. Golden values are made in the pool and compared with launches, so they are the same."""
    case = min((case for case in DEFAULT if len(case.launches) == 1), key=lambda case: case.launches[0].ranks)
    first, second = (runs.case_in_pool(case) for _ in range(2))
    compared = [name for name in case.metrics if name not in ("iteration-time", "mem-peak")]
    assert [first[0][name] for name in compared] == [second[0][name] for name in compared]
    assert not runs.faults_of(case, first)


def test_a_case_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="gpt/no-such is no case: .* there are .*gpt/dropout-ckpt-resume"):
        load("gpt/no-such")


def test_all_files_of_the_folder_belong_to_a_case() -> None:
    top = ROOT / "tests" / "functional" / "test_cases"
    folders = {str(Path(folder).relative_to(top)) for folder, _, files in os.walk(top) if files}
    assert folders == set(names())
