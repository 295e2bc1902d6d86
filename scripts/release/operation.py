"""Picks and reverts: applied one by one on a branch of their own, checked, and only then put on the release branch.

Exit statuses: 0 done; 3 conflict; 4 checks failed. In both latter cases the release branch is as it was, and the state
says what --continue and --abort do.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from scripts.release.checks import cases_for, check, write_report
from scripts.release.git import PICKED, Git, ReleaseError
from scripts.release.impact import CASES
from scripts.release.state import State

CONFLICT, CHECKS_FAILED = 3, 4
COMMANDS = {"pick": "cherry-pick", "revert": "revert"}
HEADS = {"cherry-pick": "CHERRY_PICK_HEAD", "revert": "REVERT_HEAD"}


def begin(state: State, git: Git, *, only_say: bool) -> int:
    """Start it, or say what would be done."""
    return dry_run(state, git) if only_say else start(state, git)


def start(state: State, git: Git) -> int:
    """Make the branch and apply the commits."""
    if git.has_branch(state.branch):
        raise ReleaseError(f"branch {state.branch} exists already; delete it or finish what it is about")
    git.run("switch", "--quiet", "--create", state.branch, state.onto)
    state.save(git)
    return _apply(state, git)


def resume(git: Git) -> int:
    """--continue: after a conflict was resolved, or checks that failed were mended on the branch."""
    state = State.load(git)
    if git.branch() != state.branch:
        raise ReleaseError(f"{state.branch} is not checked out; git switch {state.branch}, then --continue")
    if state.stage == "applying":
        if conflicts := git.unmerged():
            raise ReleaseError(f"still in conflict: {', '.join(conflicts)}; resolve and git add them")
        if _in_progress(git):
            _conclude(state, git)
        # What is on the branch now was concluded here or by hand; what is not (it was aborted) is applied again.
        if not _missing(state, git, [state.commits[state.done]]):
            state.done += 1
        state.save(git)
        return _apply(state, git)
    git.need_clean()
    return _check(state, git)


def abort(git: Git) -> int:
    """--abort: back to where it began; the release branch never changed."""
    state = State.load(git)
    for command in _in_progress(git):
        git.run(command, "--abort")
    if git.branch() == state.branch:
        git.need_clean()
    git.go_to(state.came_from)
    git.run("branch", "--quiet", "-D", state.branch)
    State.clear(git)
    print(f"gave up the {state.kind}; {state.onto} is as it was, {state.came_from} is checked out")
    return 0


def _in_progress(git: Git) -> list[str]:
    """git's commands that wait for the user."""
    return [command for command, head in HEADS.items() if git.path(head).exists()]


def _conclude(state: State, git: Git) -> None:
    """Commit a pick or revert whose conflicts the user resolved."""
    message = state.messages.get(state.commits[state.done])
    _bring_cases(state, git)
    if git.succeeds("diff", "--cached", "--quiet"):
        _skip(state, git)
    elif message:
        git.run("commit", "--quiet", "--message", message)
    else:
        git.run("commit", "--quiet", "--no-edit")


def _bring_cases(state: State, git: Git) -> None:
    """Keep with a revert the cases that caused it, where the branch does not have them."""
    for case in state.cases if state.bring else []:
        git.run("checkout", "--quiet", state.bring, "--", f"{CASES}/{case}")


def apply_one(state: State, git: Git) -> bool:
    """Apply the next commit; False if it stops in a conflict."""
    commit = state.commits[state.done]
    how = ("cherry-pick", "-x") if state.kind == "pick" else ("revert", "--no-commit")
    failure = git.failure(*how, commit)
    if not failure:
        if state.kind == "revert":
            _bring_cases(state, git)
            git.run("commit", "--quiet", "--message", state.messages[commit])
        return True
    if git.unmerged():
        return False
    if not _in_progress(git) or not git.succeeds("diff", "--cached", "--quiet"):
        raise ReleaseError(
            f"git could not apply {git.subject(commit)}:\n{failure}\nMend it and go on with --continue, or --abort"
        )
    _skip(state, git)  # nothing of it is new here
    return True


def _skip(state: State, git: Git) -> None:
    git.run(COMMANDS[state.kind], "--skip")
    state.skipped.append(state.commits[state.done])


def _missing(state: State, git: Git, commits: Sequence[str]) -> list[str]:
    """Those of `commits` that the branch should hold and does not."""
    bodies = git.run("log", "--format=%B", f"{state.onto}..HEAD")
    picks = state.kind == "pick"
    signs = {each: PICKED.format(each) if picks else state.messages[each].splitlines()[0] for each in commits}
    return [each for each in commits if each not in state.skipped and signs[each] not in bodies]


def _apply(state: State, git: Git) -> int:
    while state.done < len(state.commits):
        if not apply_one(state, git):
            state.save(git)
            commit = git.subject(state.commits[state.done])
            print(
                f"CONFLICT in {commit}:\n  " + "\n  ".join(git.unmerged()) + "\n"
                f"{state.onto} is untouched. Resolve the files, `git add` them, then go on with --continue; "
                "or go back with --abort."
            )
            return CONFLICT
        state.done += 1
        state.save(git)
    state.stage = "checking"
    state.save(git)
    return _check(state, git)


def _check(state: State, git: Git) -> int:
    if lost := _missing(state, git, state.commits):
        raise ReleaseError(
            f"{state.branch} does not hold {', '.join(git.subject(each) for each in lost)} any more: bring it back, or "
            "give up with --abort and begin again"
        )
    results = check(state, git)
    report = write_report(state, results, git)
    failed = [each for each in results if each.status]
    if failed:
        print(
            f"FAILED: {', '.join(each.title for each in failed)}; the report: {report}\n"
            f"{state.onto} is untouched. Mend on {state.branch} (commit) and go on with --continue; or go back "
            "with --abort."
        )
        return CHECKS_FAILED
    if state.merge:
        git.run("switch", "--quiet", state.onto)
        git.run("merge", "--quiet", "--ff-only", state.branch)
        git.run("branch", "--quiet", "-d", state.branch)
    git.go_to(state.came_from)
    State.clear(git)
    where = f"{state.onto} holds" if state.merge else f"branch {state.branch}, ready for review, holds"
    for each in state.skipped:
        print(f"nothing new in {git.subject(each)}: it is not on the branch")
    print(f"green: {where} {len(state.commits) - len(state.skipped)} commit(s); the report: {report}")
    return 0


def dry_run(state: State, git: Git) -> int:
    """Say what would be done, and whether it would apply, in a working tree of its own."""
    print(f"would make {state.branch} from {state.onto} and {state.kind}:")
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git.run("worktree", "add", "--quiet", "--detach", str(tree), state.onto)
        try:
            inside = Git(tree)
            for commit in state.commits:
                well = apply_one(state, inside)
                print(f"  {'applies ' if well else 'CONFLICT'}  {git.subject(commit)}")
                if not well:
                    print("    " + "\n    ".join(inside.unmerged()))
                    return CONFLICT
                state.done += 1
            cases = cases_for(state, inside)
        finally:
            git.run("worktree", "remove", "--force", str(tree))
    print(f"would run: {state.unit_tests or 'no unit tests'}; cases: {', '.join(cases) or 'none'}")
    return 0
