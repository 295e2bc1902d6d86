"""scripts/cut_release.sh: a release branch with its version and changelog, or a patch release of one that exists."""

from __future__ import annotations

import argparse
import datetime
import re

from scripts.release.git import Git, ReleaseError
from scripts.release.state import State

VERSION = re.compile(r'version="([^"]+)"')
UNRELEASED = "## Unreleased"


def cut(options: argparse.Namespace, git: Git) -> int:
    """Cut X.Y (a new branch core_rX.Y, version X.Y.0) or X.Y.Z (Z > 0, on the branch that exists)."""
    State.need_none(git)
    numbers = re.fullmatch(r"(\d+)\.(\d+)(?:\.([1-9]\d*))?", options.version)
    if not numbers:
        raise ReleaseError(
            f"{options.version}: a version is X.Y for a new branch or X.Y.Z, Z > 0, for a patch"
        )
    major, minor, patch = numbers.groups()
    branch, version = f"core_r{major}.{minor}", f"{major}.{minor}.{patch or 0}"
    tag = f"core_v{version}"
    git.need_clean()
    came_from = git.branch()
    if git.succeeds("rev-parse", "--verify", "--quiet", f"refs/tags/{tag}"):
        raise ReleaseError(f"{version} was released before: tag {tag} exists")
    if patch is None and git.has_branch(branch):
        raise ReleaseError(f"{branch} exists; cut a patch release: {major}.{minor}.1 or later")
    if patch is not None and not git.has_branch(branch):
        raise ReleaseError(f"{branch} does not exist; cut {major}.{minor} first")
    base = options.main if patch is None else branch
    _need_later(version, base, git)
    entries = _entries(base, git)
    if options.dry_run:
        print(f"would release {version} on {branch}, tag {tag}, with:\n" + "\n".join(entries))
        return 0
    following = f"{major}.{int(minor) + 1}.0.dev0" if patch is None else ""
    before = {name: git.find("rev-parse", f"refs/heads/{name}") for name in (branch, options.main)}
    try:
        _release(version, following, options.main, entries, git)
    except BaseException:
        _undo(before, tag, came_from, git)
        raise
    git.go_to(came_from)
    print(f"released {version}: branch {branch}, tag {tag}; nothing was pushed")
    return 0


def _need_later(version: str, base: str, git: Git) -> None:
    """ReleaseError for a version below the one that `base` is at (for a patch, not above it)."""
    found = VERSION.search(git.find("show", f"{base}:setup.py"))
    if found is None:
        raise ReleaseError(f'setup.py of {base}: no version="..." to change')
    numbers = [[int(number) for number in re.findall(r"\d+", each)[:3]] for each in (version, found.group(1))]
    if numbers[0] < numbers[1] or (numbers[0] == numbers[1] and ".dev" not in found.group(1)):
        raise ReleaseError(
            f"{version} does not come after {found.group(1)}, which {base} is at; give a later one"
        )


def _release(version: str, following: str, main: str, entries: list[str], git: Git) -> None:
    """Commit and tag the release; with a `following` version the branch is new and main goes on to that."""
    branch, tag = f"core_r{version.rpartition('.')[0]}", f"core_v{version}"
    git.run("switch", "--quiet", *(["--create", branch, main] if following else [branch]))
    released = f"## {version} ({datetime.date.today().isoformat()})\n\n" + "\n".join(entries)
    _commit(f"Release {version}", version, [released], git)
    git.run("tag", "--annotate", tag, "--message", f"Release {version}")
    if following:
        git.run("switch", "--quiet", main)
        _commit(f"Begin {following}", following, [UNRELEASED, released], git)


def _undo(before: dict[str, str], tag: str, came_from: str, git: Git) -> None:
    """Put branches, tag and files back: a release is whole or not there."""
    git.run("reset", "--quiet", "--hard")
    git.run("switch", "--quiet", "--detach")
    for name, commit in before.items():
        if commit:
            git.run("branch", "--quiet", "--force", name, commit)
        elif git.has_branch(name):
            git.run("branch", "--quiet", "-D", name)
    if git.succeeds("rev-parse", "--verify", "--quiet", f"refs/tags/{tag}"):
        git.run("tag", "--delete", tag)
    git.go_to(came_from)


def _entries(base: str, git: Git) -> list[str]:
    """What the changelog says of the release: its Unreleased section, else the subjects since the last release."""
    text = git.find("show", f"{base}:CHANGELOG.md")
    section = re.search(rf"^{UNRELEASED}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    lines = [line for line in section.group(1).strip().split("\n") if line] if section else []
    if lines:
        return lines
    last = git.find("describe", "--tags", "--abbrev=0", "--match=core_v*", base)
    subjects = git.run("log", "--reverse", "--format=- %s", f"{last}..{base}" if last else base)
    return subjects.split("\n") if subjects else ["- nothing changed"]


def _commit(subject: str, version: str, sections: list[str], git: Git) -> None:
    """Commit setup.py with `version`, and the changelog with `sections` in place of the Unreleased one."""
    setup, changelog = git.root / "setup.py", git.root / "CHANGELOG.md"
    text = setup.read_text()
    if not VERSION.search(text):
        raise ReleaseError('setup.py: no version="..." to change')
    setup.write_text(VERSION.sub(f'version="{version}"', text, count=1))
    text = changelog.read_text() if changelog.exists() else "# Changelog\n"
    head, _, rest = text.partition("\n## ")
    older = re.sub(rf"^{UNRELEASED}\n.*?(?=^## |\Z)", "", f"## {rest}", flags=re.MULTILINE | re.DOTALL)
    parts = [head.rstrip("\n"), *sections, older.strip("\n") if rest else ""]
    changelog.write_text("\n\n".join(part for part in parts if part) + "\n")
    git.run("add", "setup.py", "CHANGELOG.md")
    git.run("commit", "--quiet", "--message", subject)
