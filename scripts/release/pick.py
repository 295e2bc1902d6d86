"""scripts/cherry_pick.sh: commits of main onto a release branch or dev."""

from __future__ import annotations

import argparse

from scripts.release.git import Git, ReleaseError
from scripts.release.operation import begin
from scripts.release.state import State


def pick(options: argparse.Namespace, git: Git) -> int:
    """Check the request and start."""
    State.need_none(git)
    git.need_release_branch(options.onto)
    if not git.has_branch(options.main):
        raise ReleaseError(f"--main {options.main}: no such branch")
    commits = in_order([git.commit(each) for each in options.commits], options.main, git)
    reland: list[str] = []
    for commit in commits:
        reland += _cases_to_rerun(commit, options.onto, git)
    git.need_clean()
    state = State(
        "pick", commits, options.onto, f"cherry-pick/{options.onto}/{commits[0][:10]}", git.branch(),
        options.unit_tests, options.case_command, options.merge, cases=[*dict.fromkeys(reland)],
    )  # fmt: skip
    if reland:
        print(f"reverted before; runs first: {', '.join(state.cases)}")
    return begin(state, git, only_say=options.dry_run)


def in_order(commits: list[str], main: str, git: Git) -> list[str]:
    """The commits in main's order, oldest first; ReleaseError for one that is not on main, a merge or a repetition."""
    for commit in commits:
        if not git.holds(main, commit):
            raise ReleaseError(f"{git.subject(commit)}: not on {main}; land it there first")
        if len(git.run("rev-list", "--parents", "-1", commit).split()) > 2:
            raise ReleaseError(f"{git.subject(commit)}: a merge; pick the commits that it brought")
    if len(set(commits)) < len(commits):
        raise ReleaseError("a commit is named twice")
    wanted = set(commits)
    return [each for each in git.run("rev-list", "--reverse", "--topo-order", main).split() if each in wanted]


def _cases_to_rerun(commit: str, onto: str, git: Git) -> list[str]:
    """Cases that caused reverts on `onto` of `commit`, or of one that it lands again under another name.

    ReleaseError if the branch holds the commit already.
    """
    holds = len(git.picks_of(commit, onto)) + git.holds(onto, commit)
    reverts = git.reverts_of(commit, onto)
    if holds > len(reverts):
        raise ReleaseError(f"{git.subject(commit)}: {onto} has it already")
    for earlier in git.relanded_by(commit, onto):
        reverts += git.reverts_of(earlier, onto)
    return [case for _, case in reverts if case]
