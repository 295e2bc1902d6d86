"""An operation that stopped half-way: kept in git's folder, so that --continue and --abort know what to do."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from scripts.release.git import Git, ReleaseError

FILE = "megatron-release.json"


@dataclass
class State:
    """What is being done.

    Attributes:
        kind: "pick" or "revert".
        commits: all commits, in the order of application.
        done: how many of them are applied.
        onto: the release branch, which is not touched before everything is green.
        branch: the branch on which the commits are applied.
        came_from: what was checked out before.
        messages: of a revert, by commit.
        cases: functional cases that run in any case (what an earlier revert was about).
        unit_tests, case_command: commands; "" runs nothing. `{case}` stands for a case's name.
        merge: fast-forward `onto` when green.
        stage: "applying" or "checking".
        bring: of a revert, a commit that has `cases` where `onto` does not: they are added to the revert.
        skipped: commits that brought nothing new.
    """

    kind: str
    commits: list[str]
    onto: str
    branch: str
    came_from: str
    unit_tests: str
    case_command: str
    merge: bool
    done: int = 0
    messages: dict[str, str] = field(default_factory=dict)
    cases: list[str] = field(default_factory=list)
    stage: str = "applying"
    bring: str = ""
    skipped: list[str] = field(default_factory=list)

    def save(self, git: Git) -> None:
        """Write it."""
        git.path(FILE).write_text(json.dumps(asdict(self), indent=1))

    @staticmethod
    def clear(git: Git) -> None:
        """Forget it."""
        git.path(FILE).unlink(missing_ok=True)

    @classmethod
    def load(cls, git: Git) -> State:
        """The operation in progress; ReleaseError if there is none."""
        path = git.path(FILE)
        if not path.exists():
            raise ReleaseError("no cherry-pick or revert is in progress; nothing to continue or abort")
        return cls(**json.loads(path.read_text()))

    @staticmethod
    def need_none(git: Git) -> None:
        """ReleaseError while an operation is in progress."""
        if git.path(FILE).exists():
            state = State.load(git)
            raise ReleaseError(
                f"a {state.kind} onto {state.onto} is in progress on {state.branch}: go on with --continue or give it "
                "up with --abort"
            )
