"""scripts/bisect_golden.sh: the first commit at which a functional case fails."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import tempfile
from pathlib import Path

from scripts.release.git import Git, ReleaseError
from scripts.release.impact import CASES, config_of

SKIP = 125


def bisect(options: argparse.Namespace, git: Git) -> int:
    """Find it with `git bisect run` in a working tree of its own; yours is not touched."""
    good, bad = git.commit(options.good), git.commit(options.bad)
    if not git.holds(bad, good):
        raise ReleaseError(f"--good {options.good} is not an ancestor of --bad {options.bad}")
    values = git.commit(options.values_of) if options.values_of else None
    for commit in (values or good, bad):
        if not git.has_file(commit, config_of(options.case)):
            raise ReleaseError(f"{options.case}: no such functional case at {git.subject(commit)}")
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        script = Path(folder) / "judge.sh"
        script.write_text(_judge(options.case, options.case_command, values))
        git.run("worktree", "add", "--quiet", "--detach", str(tree), bad)
        try:
            inside = Git(tree)
            for name, commit in (("good", good), ("bad", bad)):
                inside.run("checkout", "--quiet", "--detach", commit)
                if _judged(inside, script, _environment(git)) != (0 if name == "good" else 1):
                    raise ReleaseError(f"{options.case} is not {name} at {git.subject(commit)} (--{name})")
            inside.run("bisect", "start", bad, good)
            said = inside.run("bisect", "run", "env", *_words(_environment(git)), "bash", str(script))
        finally:
            git.run("worktree", "remove", "--force", str(tree))
    first = next(
        (line.split()[0] for line in said.split("\n") if line.endswith("is the first bad commit")), ""
    )
    if not first:
        print(said)
        raise RuntimeError("git bisect named no commit; what it said is above")
    print(f"{options.case} fails since {git.subject(first)}")
    print(git.run("show", "--stat", "--format=%an, %ad", first))
    return 0


def _words(environment: dict[str, str]) -> list[str]:
    return [f"{name}={environment[name]}" for name in ("MEGATRON_ND_VENV",)]


def _environment(git: Git) -> dict[str, str]:
    """The user's Python environment serves all commits: each would make one of its own otherwise."""
    return {"MEGATRON_ND_VENV": str(git.root / ".venv"), **os.environ}


def _judged(tree: Git, script: Path, environment: dict[str, str]) -> int:
    """What the script says of what is checked out."""
    done = subprocess.run(
        ["bash", str(script)], cwd=tree.root, capture_output=True, check=False, env=environment
    )
    return done.returncode


def _judge(case: str, command: str, values: str | None) -> str:
    """A script: 0 good, 1 bad, 125 where the case does not exist at this commit, or its command says so."""
    folder = f"{CASES}/{case}"
    lines = ["set -u", f"[ -f {shlex.quote(config_of(case))} ] || exit {SKIP}"]
    if values:
        lines.append(f"git checkout --quiet {values} -- {shlex.quote(folder)}")
    lines += [command.replace("{case}", shlex.quote(case)), "status=$?"]
    if values:
        lines.append("git reset --hard --quiet")
    return "\n".join([*lines, f"case $status in 0 | {SKIP}) exit $status ;; esac", "exit 1", ""])
