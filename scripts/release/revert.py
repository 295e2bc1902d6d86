"""scripts/revert_release.sh: takes commits out of a release branch; the case that caused it is kept with the revert."""

from __future__ import annotations

import argparse

from scripts.release.git import Git, ReleaseError
from scripts.release.impact import all_cases, config_of
from scripts.release.operation import begin
from scripts.release.state import State


def revert(options: argparse.Namespace, git: Git) -> int:
    """Check the request and start."""
    State.need_none(git)
    git.need_release_branch(options.onto)
    originals = [git.commit(each) for each in options.commits]
    here = {original: _on_branch(original, options.onto, git) for original in originals}
    case = options.case or ""
    has_case = {each: git.has_file(each, config_of(case)) for each in (options.onto, options.main)}
    if case and not any(has_case.values()):
        known = ", ".join(all_cases(git.root)) or "none"
        raise ReleaseError(f"--case {case}: no such functional case; there are: {known}")
    git.need_clean()
    order = git.run("rev-list", options.onto).split()  # newest first, so that later commits go first
    commits = sorted(here.values(), key=order.index)
    original_of = {found: original for original, found in here.items()}
    messages = {}
    for commit in commits:
        messages[commit] = _message(commit, original_of[commit], options.reason, case, git)
    state = State(
        "revert", commits, options.onto, f"revert/{options.onto}/{commits[0][:10]}", git.branch(),
        options.unit_tests, options.case_command, options.merge, messages=messages, cases=[case] if case else [],
        bring=git.commit(options.main) if case and not has_case[options.onto] else "",
    )  # fmt: skip
    return begin(state, git, only_say=options.dry_run)


def _on_branch(commit: str, onto: str, git: Git) -> str:
    """The commit of `onto` that brought `commit`: its newest pick, or itself; ReleaseError if there is none now."""
    picks = git.picks_of(commit, onto)
    is_there = git.holds(onto, commit)
    if not picks and not is_there:
        raise ReleaseError(f"{git.subject(commit)}: {onto} does not have it; there is nothing to revert")
    if len(picks) + is_there <= len(git.reverts_of(commit, onto)):
        raise ReleaseError(f"{git.subject(commit)}: reverted on {onto} already")
    return picks[0] if picks else commit


def _message(commit: str, original: str, reason: str, case: str, git: Git) -> str:
    subject = git.run("log", "-1", "--format=%s", commit)
    trailers = [f"Reverted-commit: {original}"]
    if case:
        trailers.append(f"Reverted-for-case: {case}")
    return f'Revert "{subject}"\n\nThis reverts commit {commit}.\n\n{reason}\n\n' + "\n".join(trailers)
