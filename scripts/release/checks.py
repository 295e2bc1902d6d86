"""Runs the unit tests and the functional cases that a change touches, and writes the report."""

from __future__ import annotations

import os
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

from scripts.release.git import Git
from scripts.release.impact import all_cases, touched_cases
from scripts.release.state import State

TAIL = 40


@dataclass(frozen=True)
class Result:
    """One command: its title, exit status and the end of what it printed."""

    title: str
    status: int
    output: str


def _run(title: str, command: str, git: Git) -> Result:
    print(f"  {title} ...", flush=True)
    # The commands may call git; the user's terminal editor must not open in them.
    environment = {**os.environ, "GIT_EDITOR": "true"}
    done = subprocess.run(
        shlex.split(command), cwd=git.root, capture_output=True, text=True, check=False, env=environment
    )
    print(
        f"  {title}: {'ok' if done.returncode == 0 else f'FAILED with status {done.returncode}'}", flush=True
    )
    lines = (done.stdout + done.stderr).rstrip().split("\n")
    return Result(title, done.returncode, "\n".join(lines[-TAIL:]))


def cases_for(state: State, git: Git) -> list[str]:
    """The cases to run for what is checked out: those of an earlier revert first, then what the changed files touch."""
    changed = git.changed_files(git.run("merge-base", state.onto, "HEAD"), "HEAD")
    touched = touched_cases(all_cases(git.root), changed)
    return [*dict.fromkeys(state.cases), *(case for case in touched if case not in state.cases)]


def check(state: State, git: Git) -> list[Result]:
    """Run everything; a re-landed change's own case comes first and ends the rest if it fails."""
    results = []
    cases = cases_for(state, git) if state.case_command else []
    for case in (case for case in cases if case in state.cases):
        results.append(_case(case, state, git))
    if any(result.status for result in results):
        return results
    if state.unit_tests:
        results.append(_run("unit tests", state.unit_tests, git))
    results += [_case(case, state, git) for case in cases if case not in state.cases]
    return results


def _case(case: str, state: State, git: Git) -> Result:
    return _run(f"case {case}", state.case_command.replace("{case}", shlex.quote(case)), git)


def write_report(state: State, results: list[Result], git: Git) -> Path:
    """Write runs/release/BRANCH.md: commits, files, every command, and what differed in metrics where one failed."""
    base = git.run("merge-base", state.onto, state.branch)
    lines = [f"# {state.kind} onto {state.onto}", "", f"Branch {state.branch}, from {git.subject(base)}.", ""]
    lines += [f"- {git.subject(commit)}" for commit in state.commits]
    lines += ["", "## Files", ""]
    lines += [f"    {line}" for line in git.run("diff", "--stat", base, state.branch).split("\n")]
    lines += ["", "## Checks", "", "| check | result |", "|---|---|"]
    lines += [
        f"| {each.title} | {'ok' if each.status == 0 else f'status {each.status}'} |" for each in results
    ]
    if not results:
        lines.append("| none was asked for | |")
    lines += ["", "## Metrics and output", ""]
    for each in results:
        lines += [f"### {each.title}", "", *(f"    {line}" for line in each.output.split("\n")), ""]
    path = git.root / "runs" / "release" / f"{state.branch.replace('/', '-')}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path
