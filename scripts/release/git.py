"""git as the release tools call it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

RELEASE_BRANCH = re.compile(r"core_r\d+\.\d+|dev")
PICKED = "(cherry picked from commit {})"


class ReleaseError(Exception):
    """What the user must change, in a line or two; nothing was done."""


class Git:
    """The repository that contains `root`."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        found = self._call("rev-parse", "--show-toplevel")
        if found.returncode:
            raise ReleaseError(f"{root} is not in a git repository")
        self.root = Path(found.stdout.strip())

    def _call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "GIT_EDITOR": "true", "LC_ALL": "C"}
        command = ["git", "-C", str(self.root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    def run(self, *arguments: str) -> str:
        """Standard output without the last newline; RuntimeError with git's own words if it fails."""
        done = self._call(*arguments)
        if done.returncode:
            raise RuntimeError(f"git {' '.join(arguments)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout.rstrip("\n")

    def succeeds(self, *arguments: str) -> bool:
        """Whether the command exits with 0."""
        return self._call(*arguments).returncode == 0

    def failure(self, *arguments: str) -> str:
        """What git says where the command fails; "" where it succeeds."""
        done = self._call(*arguments)
        return (done.stderr.strip() or done.stdout.strip() or "failed") if done.returncode else ""

    def find(self, *arguments: str) -> str:
        """Standard output without the last newline; "" if it fails."""
        done = self._call(*arguments)
        return "" if done.returncode else done.stdout.rstrip("\n")

    def path(self, name: str) -> Path:
        """A file of git's own folder for this working tree."""
        return self.root / self.run("rev-parse", "--git-path", name)

    def commit(self, revision: str) -> str:
        """The full name of a commit."""
        found = self.find("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
        if not found:
            raise ReleaseError(
                f"{revision} is not a commit of this repository; fetch first, or check the name"
            )
        return found

    def subject(self, commit: str) -> str:
        """Abbreviated name and subject."""
        return self.run("log", "-1", "--format=%h %s", commit)

    def branch(self) -> str:
        """The branch that is checked out, or the commit where none is."""
        return self.run("branch", "--show-current") or self.run("rev-parse", "HEAD")

    def go_to(self, name: str) -> None:
        """Check out a branch, or a commit, as `branch()` gave it."""
        self.run("switch", "--quiet", *([] if self.has_branch(name) else ["--detach"]), name)

    def holds(self, branch: str, commit: str) -> bool:
        """Whether `commit` is `branch` or an ancestor of it."""
        return self.succeeds("merge-base", "--is-ancestor", commit, branch)

    def has_file(self, revision: str, name: str) -> bool:
        """Whether a file exists at a commit."""
        return self.succeeds("cat-file", "-e", f"{revision}:{name}")

    def has_branch(self, name: str) -> bool:
        """Whether a local branch exists."""
        return self.succeeds("rev-parse", "--verify", "--quiet", f"refs/heads/{name}")

    def need_clean(self) -> None:
        """ReleaseError if tracked files have changes, or another operation is in progress."""
        changed = self.run("status", "--porcelain", "--untracked-files=no")
        if changed:
            raise ReleaseError(f"the working tree has changes; commit or stash them first:\n{changed}")

    def need_release_branch(self, name: str) -> None:
        """ReleaseError unless `name` is an existing release branch or dev."""
        if not RELEASE_BRANCH.fullmatch(name):
            raise ReleaseError(f"--onto {name}: not a release branch; they are called core_rX.Y, or dev")
        if not self.has_branch(name):
            known = [line for line in self.run("branch", "--format=%(refname:short)").split("\n")
                     if RELEASE_BRANCH.fullmatch(line)]  # fmt: skip
            raise ReleaseError(f"--onto {name}: no such branch; there are: {', '.join(known) or 'none'}")

    def changed_files(self, base: str, head: str) -> list[str]:
        """Files that differ between two commits."""
        return [name for name in self.run("diff", "--name-only", "-z", base, head).split("\0") if name]

    def unmerged(self) -> list[str]:
        """Files with conflicts, which wait for the user."""
        return self.run("diff", "--name-only", "--diff-filter=U").splitlines()

    def picks_of(self, commit: str, branch: str) -> list[str]:
        """Commits of `branch` that were picked from `commit`, newest first."""
        pattern = PICKED.format(commit)
        return self.run("log", "--format=%H", "--fixed-strings", f"--grep={pattern}", branch).split()

    def patch_id(self, commit: str) -> str:
        """What the commit changes, whatever it stands on and is called; "" for a merge or nothing."""
        patch = self.run("diff-tree", "--patch", "--root", commit)
        done = subprocess.run(
            ["git", "-C", str(self.root), "patch-id", "--stable"],
            input=patch + "\n", capture_output=True, text=True, check=False,
        )  # fmt: skip
        return done.stdout.split(" ")[0]

    def relanded_by(self, commit: str, branch: str) -> list[str]:
        """Commits reverted on `branch` that `commit` lands again: named by a trailer `Relands:`, or the same patch."""
        found = self.run("log", "--format=%(trailers:key=Reverted-commit,valueonly)", branch).split()
        named = self.run("log", "-1", "--format=%(trailers:key=Relands,valueonly)", commit).split()
        patch = self.patch_id(commit)
        return [
            each
            for each in dict.fromkeys(found)
            if each != commit
            and (
                any(len(name) >= 7 and each.startswith(name) for name in named)
                or (patch and self.find("cat-file", "-t", each) and self.patch_id(each) == patch)
            )
        ]

    def reverts_of(self, commit: str, branch: str) -> list[tuple[str, str]]:
        """(revert on `branch`, the case that caused it or "") for reverts of `commit`, newest first."""
        found = self.run("log", "--format=%H", "--fixed-strings", f"--grep=Reverted-commit: {commit}", branch)
        trailer = "--format=%(trailers:key=Reverted-for-case,valueonly)"
        return [(each, self.run("log", "-1", trailer, each).strip()) for each in found.split()]
