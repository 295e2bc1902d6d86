"""The release scripts on throw-away repositories: cut, pick, conflict, failing golden, revert, re-land, bisect.

The repository's "model" is a number in model.txt; a functional case holds it to the number in its golden.txt.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from scripts.release.impact import all_cases, touched_cases

ROOT = Path(__file__).resolve().parents[3]
CASE = "tests/functional/test_cases/gpt/zero1"
JUDGE = """set -eu
folder=tests/functional/test_cases/$1
if ! diff model.txt "$folder/golden.txt" >/dev/null; then
    echo "lm loss: expected $(cat "$folder/golden.txt"), found $(cat model.txt)"; exit 1
fi
echo "$1: as it should be"
"""
NO_UNIT_TESTS = ("--unit-tests", "true")


class Repository:
    """A repository with a model, one case, and the release scripts called on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.git("init", "--quiet", "--initial-branch=main")
        self.git("config", "user.name", "A")
        self.git("config", "user.email", "a@example.com")
        self.first = self.commit(
            "Begin",
            {
                "setup.py": 'setup(version="0.1.0.dev0")\n',
                "CHANGELOG.md": "# Changelog\n\n## Unreleased\n\n- A model of 1.\n",
                "model.txt": "1\n",
                "notes.txt": "one\n",
                ".gitattributes": (ROOT / ".gitattributes").read_text(),
                "judge.sh": JUDGE,
                f"{CASE}/model_config.yaml": "DEFAULT: true\n",
                f"{CASE}/golden.txt": "1\n",
            },
        )

    def git(self, *arguments: str) -> str:
        command = ["git", "-C", str(self.folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def commit(self, subject: str, files: dict[str, str]) -> str:
        for name, text in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self.git("add", *files)
        self.git("commit", "--quiet", "--message", subject)
        return self.git("rev-parse", "HEAD")

    def script(self, name: str, *arguments: str) -> tuple[int, str]:
        command = [str(ROOT / "scripts" / name), *arguments]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    def pick(self, *arguments: str) -> tuple[int, str]:
        return self.script(
            "cherry_pick.sh", *arguments, *NO_UNIT_TESTS, "--case-command", "sh judge.sh {case}"
        )

    def show(self, revision: str, name: str) -> str:
        return self.git("show", f"{revision}:{name}")


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    made = Repository(tmp_path / "repository")
    status, said = made.script("cut_release.sh", "0.1")
    assert status == 0, said
    return made


def test_a_cut_makes_branch_version_changelog_and_tag(repository: Repository) -> None:
    assert 'version="0.1.0"' in repository.show("core_r0.1", "setup.py")
    assert 'version="0.2.0.dev0"' in repository.show("main", "setup.py")
    released, main = (repository.show(name, "CHANGELOG.md") for name in ("core_r0.1", "main"))
    assert "## Unreleased" not in released
    assert "## 0.1.0 (" in released
    assert main.index("## Unreleased") < main.index("## 0.1.0 (") < main.index("- A model of 1.")
    assert repository.git("rev-list", "-1", "core_v0.1.0") == repository.git("rev-parse", "core_r0.1")
    assert repository.git("branch", "--show-current") == "main"
    status, said = repository.script("cut_release.sh", "0.1")
    assert (status, "tag core_v0.1.0 exists" in said) == (2, True), said
    repository.git("tag", "--delete", "core_v0.1.0")
    repository.git("branch", "-D", "core_r0.1")
    status, said = repository.script("cut_release.sh", "0.1")
    assert (status, "0.1.0 does not come after 0.2.0.dev0, which main is at" in said) == (2, True), said
    status, said = repository.script("cut_release.sh", "0.2.1")
    assert (status, "core_r0.2 does not exist; cut 0.2 first" in said) == (2, True), said


def test_a_patch_release_lists_what_was_picked(repository: Repository) -> None:
    fix = repository.commit("Mend the notes", {"notes.txt": "two\n"})
    assert repository.pick(fix, "--onto", "core_r0.1", "--merge")[0] == 0
    assert repository.script("cut_release.sh", "0.1.1")[0] == 0
    text = repository.show("core_r0.1", "CHANGELOG.md")
    assert text.index("## 0.1.1 (") < text.index("- Mend the notes") < text.index("## 0.1.0 (")
    assert 'version="0.1.1"' in repository.show("core_r0.1", "setup.py")


def test_a_pick_is_checked_on_its_own_branch_and_reported(repository: Repository) -> None:
    later = repository.commit("Mend the notes", {"notes.txt": "two\n"})
    last = repository.commit("Mend the notes again", {"notes.txt": "three\n"})
    before = repository.git("rev-parse", "core_r0.1")
    status, said = repository.pick(last, later, "--onto", "core_r0.1")  # put into main's order
    assert status == 0, said
    branch = f"cherry-pick/core_r0.1/{later[:10]}"
    assert repository.git("rev-parse", "core_r0.1") == before
    assert repository.git("log", "--format=%s", f"core_r0.1..{branch}").split("\n") == [
        "Mend the notes again",
        "Mend the notes",
    ]
    assert f"(cherry picked from commit {later})" in repository.git("log", f"core_r0.1..{branch}")
    report = (repository.folder / "runs/release" / f"{branch.replace('/', '-')}.md").read_text()
    assert "Mend the notes again" in report and "notes.txt" in report and "| unit tests | ok |" in report
    assert repository.git("branch", "--show-current") == "main"


def test_a_dry_run_changes_nothing(repository: Repository) -> None:
    good = repository.commit("Change the model", {"model.txt": "2\n", f"{CASE}/golden.txt": "2\n"})
    references = repository.git("for-each-ref")
    status, said = repository.pick(good, "--onto", "core_r0.1", "--dry-run")
    assert status == 0 and "applies" in said and "cases: gpt/zero1" in said, said
    repository.git("switch", "--quiet", "core_r0.1")
    repository.commit("Go another way", {"model.txt": "5\n"})
    repository.git("switch", "--quiet", "main")
    status, said = repository.pick(good, "--onto", "core_r0.1", "--dry-run")
    assert status == 3 and "CONFLICT" in said and "model.txt" in said, said
    repository.git("branch", "--force", "core_r0.1", "core_r0.1~1")
    assert repository.git("for-each-ref") == references
    assert len(repository.git("worktree", "list").split("\n")) == 1


def test_a_conflict_stops_and_can_be_given_up_or_resolved(repository: Repository) -> None:
    change = repository.commit("Change the notes", {"notes.txt": "main\n"})
    more = repository.commit("Add a file", {"more.txt": "more\n"})
    repository.git("switch", "--quiet", "core_r0.1")
    before = repository.commit("Go another way", {"notes.txt": "release\n"})
    repository.git("switch", "--quiet", "main")
    wanted = (change, more, "--onto", "core_r0.1")
    status, said = repository.pick(*wanted)
    assert status == 3 and "notes.txt" in said and "--continue" in said and "--abort" in said, said
    status, said = repository.pick(*wanted)
    assert status == 2 and "in progress" in said, said
    status, said = repository.pick("--continue")
    assert status == 2 and "still in conflict: notes.txt" in said, said
    status, said = repository.pick("--abort")
    assert status == 0, said
    assert repository.git("branch", "--show-current") == "main"
    assert repository.git("rev-parse", "core_r0.1") == before
    assert "cherry-pick/" not in repository.git("branch", "--list")
    assert not repository.git("status", "--porcelain", "--untracked-files=no")

    assert repository.pick(*wanted, "--merge")[0] == 3
    (repository.folder / "notes.txt").write_text("both\n")
    repository.git("add", "notes.txt")
    status, said = repository.pick("--continue")
    assert status == 0, said
    assert repository.show("core_r0.1", "notes.txt") == "both"
    assert repository.show("core_r0.1", "more.txt") == "more"
    assert f"(cherry picked from commit {change})" in repository.git("log", "-2", "core_r0.1")


def test_no_commit_is_lost_on_the_way(repository: Repository) -> None:
    """A file in the way, a pick aborted behind the tool's back, a branch reset: never green without the commit."""
    new = repository.commit("Add a file", {"new.txt": "new\n"})
    more = repository.commit("Add more", {"more.txt": "more\n"})
    repository.git("switch", "--quiet", "core_r0.1")
    (repository.folder / "new.txt").write_text("in the way\n")
    status, said = repository.pick(new, more, "--onto", "core_r0.1", "--merge")
    assert status == 2 and "git could not apply" in said and "would be overwritten" in said, said
    assert "Traceback" not in said
    assert repository.pick("--continue")[0] == 2  # it is in the way still
    (repository.folder / "new.txt").unlink()
    status, said = repository.pick("--continue")
    assert status == 0 and "core_r0.1 holds 2 commit(s)" in said, said
    assert (
        repository.show("core_r0.1", "new.txt") == "new"
        and repository.show("core_r0.1", "more.txt") == "more"
    )

    repository.git("switch", "--quiet", "main")
    change = repository.commit("Change the notes", {"notes.txt": "main\n"})
    repository.git("switch", "--quiet", "core_r0.1")
    repository.commit("Go another way", {"notes.txt": "release\n"})
    assert repository.pick(change, "--onto", "core_r0.1")[0] == 3
    repository.git("cherry-pick", "--abort")
    assert repository.pick("--continue")[0] == 3  # asked again
    (repository.folder / "notes.txt").write_text("both\n")
    repository.git("add", "notes.txt")
    repository.git("commit", "--quiet", "--no-edit")  # by hand
    status, said = repository.pick("--continue")
    assert status == 0 and "holds 1 commit(s)" in said, said


def test_a_branch_that_lost_its_picks_is_not_green(repository: Repository) -> None:
    change = repository.commit("Change the model", {"model.txt": "2\n"})
    status, said = repository.script("cherry_pick.sh", change, "--onto", "core_r0.1", "--unit-tests", "false")
    assert status == 4, said
    repository.git("reset", "--quiet", "--hard", "core_r0.1")
    status, said = repository.pick("--continue")
    assert status == 2 and "does not hold" in said and "Change the model" in said, said


def test_a_pick_without_anything_new_is_said(repository: Repository) -> None:
    change = repository.commit("Add a file", {"new.txt": "new\n"})
    repository.git("switch", "--quiet", "core_r0.1")
    repository.commit("Add it here", {"new.txt": "new\n"})
    repository.git("switch", "--quiet", "main")
    status, said = repository.pick(change, "--onto", "core_r0.1")
    assert status == 0 and "nothing new in" in said and "holds 0 commit(s)" in said, said


def test_a_failing_golden_leaves_the_release_untouched(repository: Repository) -> None:
    bad = repository.commit("Change the model", {"model.txt": "2\n", "megatron/fsdp/x.py": "\n"})
    before = repository.git("rev-parse", "core_r0.1")
    status, said = repository.pick(bad, "--onto", "core_r0.1", "--merge")
    assert status == 4 and "case gpt/zero1" in said, said
    branch = f"cherry-pick/core_r0.1/{bad[:10]}"
    report = (repository.folder / "runs/release" / f"{branch.replace('/', '-')}.md").read_text()
    assert "lm loss: expected 1, found 2" in report
    assert repository.git("rev-parse", "core_r0.1") == before
    repository.commit("Mend it", {"model.txt": "1\n"})  # on the branch, which is checked out
    status, said = repository.pick("--continue")
    assert status == 0, said
    assert repository.show("core_r0.1", "model.txt") == "1"


def test_a_reverted_change_runs_its_case_first_when_it_lands_again(repository: Repository) -> None:
    """The case that caused the revert is only on main; it is kept with the revert."""
    fault = repository.commit("Speed up", {"model.txt": "2\n"})
    unchecked = (*NO_UNIT_TESTS, "--case-command", "")
    status, said = repository.script("cherry_pick.sh", fault, "--onto", "core_r0.1", "--merge", *unchecked)
    assert status == 0, said
    case = CASE.replace("zero1", "zero3")
    repository.commit("Add a case", {f"{case}/model_config.yaml": "A: 1\n", f"{case}/golden.txt": "1\n"})
    command = ("--onto", "core_r0.1", "--merge", *NO_UNIT_TESTS, "--case-command", "sh judge.sh {case}")
    status, said = repository.script(
        "revert_release.sh", fault, "--reason", "It is wrong.", "--case", "gpt/zero3", *command
    )
    assert status == 0, said
    assert repository.show("core_r0.1", "model.txt") == "1"
    assert repository.show("core_r0.1", f"{case}/golden.txt") == "1"
    message = repository.git("log", "-1", "--format=%B", "core_r0.1")
    assert f"Reverted-commit: {fault}" in message and "Reverted-for-case: gpt/zero3" in message
    status, said = repository.script("revert_release.sh", fault, "--reason", "Again.", *command)
    assert status == 2 and "reverted on core_r0.1 already" in said, said

    status, said = repository.script("cherry_pick.sh", fault, *command)
    assert status == 4 and "runs first: gpt/zero3" in said and "FAILED: case gpt/zero3" in said, said
    assert "unit tests" not in said
    assert repository.script("cherry_pick.sh", "--abort")[0] == 0


@pytest.mark.parametrize("named", [True, False])
def test_a_change_that_lands_again_as_another_commit_runs_the_case_too(
    repository: Repository, named: bool
) -> None:
    """By a trailer where it was mended meanwhile, by its patch where it is the same."""
    fault = repository.commit("Speed up", {"model.txt": "2\n"})
    command = ("--onto", "core_r0.1", "--merge", *NO_UNIT_TESTS, "--case-command", "sh judge.sh {case}")
    unchecked = ("--onto", "core_r0.1", "--merge", *NO_UNIT_TESTS, "--case-command", "")
    assert repository.script("cherry_pick.sh", fault, *unchecked)[0] == 0
    reason = ("--reason", "It is wrong.", "--case", "gpt/zero1")
    assert repository.script("revert_release.sh", fault, *reason, *command)[0] == 0
    repository.commit("Go back", {"model.txt": "1\n"})
    subject = f"Speed up, mended\n\nRelands: {fault[:12]}" if named else "Speed up once more"
    again = repository.commit(subject, {"model.txt": "3\n" if named else "2\n"})
    status, said = repository.script("cherry_pick.sh", again, *command)
    assert status == 4 and "runs first: gpt/zero1" in said and "FAILED: case gpt/zero1" in said, said


def test_picks_bring_their_lines_of_the_changelog_without_conflict(repository: Repository) -> None:
    """Every change adds a line at the same place; the release has other lines there."""
    text = repository.show("main", "CHANGELOG.md") + "\n"
    entry = "## Unreleased\n\n- One more thing.\n"
    one = repository.commit("One more thing", {"CHANGELOG.md": text.replace("## Unreleased\n", entry)})
    later = entry + "- And another.\n"
    two = repository.commit("Add another", {"CHANGELOG.md": text.replace("## Unreleased\n", later)})
    for commit in (two, one):  # not in main's order
        status, said = repository.pick(commit, "--onto", "core_r0.1", "--merge")
        assert status == 0, said
    released = repository.show("core_r0.1", "CHANGELOG.md")
    assert "- One more thing." in released and "- And another." in released and "<<<<" not in released


@pytest.mark.parametrize("version", ["0.2", "0.1.1"])
def test_a_cut_that_fails_leaves_nothing(repository: Repository, version: str) -> None:
    """A hook refuses the commit that follows the release, or the release itself."""
    references, head = repository.git("for-each-ref"), repository.git("branch", "--show-current")
    hook = repository.folder / ".git" / "hooks" / "commit-msg"
    hook.write_text(f'#!/bin/sh\n! grep -q "{"Begin 0.3" if version == "0.2" else "Release"}" "$1"\n')
    hook.chmod(0o755)
    status, said = repository.script("cut_release.sh", version)
    assert status == 2 and "git commit" in said, said
    assert repository.git("for-each-ref") == references
    assert repository.git("branch", "--show-current") == head
    assert not repository.git("status", "--porcelain")
    hook.unlink()
    assert repository.script("cut_release.sh", version)[0] == 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["HEAD", "--onto", "release"], "not a release branch; they are called core_rX.Y, or dev"),
        (["HEAD", "--onto", "core_r0.9"], "no such branch; there are: core_r0.1"),
        (["nothing", "--onto", "core_r0.1"], "nothing is not a commit of this repository"),
        (["HEAD", "HEAD", "--onto", "core_r0.1"], "a commit is named twice"),
        (["aside", "--onto", "core_r0.1"], "not on main; land it there first"),
        (["main~1", "--onto", "core_r0.1"], "core_r0.1 has it already"),
        (["HEAD"], "name the commits and the branch"),
        (["--continue"], "nothing to continue or abort"),
    ],
)
def test_bad_requests_are_refused(repository: Repository, arguments: list[str], message: str) -> None:
    repository.git("switch", "--quiet", "--create", "aside")
    repository.commit("Not on main", {"aside.txt": "\n"})
    repository.git("switch", "--quiet", "main")
    references = repository.git("for-each-ref")
    status, said = repository.pick(*arguments)
    assert (status, message in said) == (2, True), said
    assert repository.git("for-each-ref") == references


def test_changes_that_are_not_committed_are_kept(repository: Repository) -> None:
    last = repository.commit("Mend the notes", {"notes.txt": "two\n"})
    (repository.folder / "notes.txt").write_text("mine\n")
    status, said = repository.pick(last, "--onto", "core_r0.1")
    assert status == 2 and "commit or stash them first" in said, said
    assert (repository.folder / "notes.txt").read_text() == "mine\n"


def test_dev_is_a_target_too(repository: Repository) -> None:
    repository.git("branch", "dev", "main")
    last = repository.commit("Mend the notes", {"notes.txt": "two\n"})
    assert repository.pick(last, "--onto", "dev", "--merge")[0] == 0
    assert repository.show("dev", "notes.txt") == "two"


def test_bisection_names_the_commit_that_moved_a_case(repository: Repository) -> None:
    commits = [repository.commit(f"Note {i}", {"notes.txt": f"{i}\n"}) for i in range(3)]
    fault = repository.commit("Break the model", {"model.txt": "3\n"})
    commits += [repository.commit(f"Note {i}", {"notes.txt": f"{i}\n"}) for i in range(3, 6)]
    command = ("--case-command", "sh judge.sh {case}")
    status, said = repository.script("bisect_golden.sh", "gpt/zero1", "--good", commits[0], *command)
    assert status == 0 and f"fails since {fault[:7]}" in said and "Break the model" in said, said
    assert len(repository.git("worktree", "list").split("\n")) == 1
    status, said = repository.script(
        "bisect_golden.sh", "gpt/zero1", "--good", commits[0], "--bad", commits[1], *command
    )
    assert status == 2 and "is not bad at" in said, said


def test_bisection_skips_what_cannot_be_judged(repository: Repository) -> None:
    """A commit whose command says 125 is neither good nor bad."""
    good = repository.commit("Note", {"notes.txt": "0\n"})
    repository.commit("Break the build", {"broken.txt": "\n"})
    repository.git("rm", "--quiet", "broken.txt")
    repository.git("commit", "--quiet", "--message", "Mend the build")
    fault = repository.commit("Break the model", {"model.txt": "3\n"})
    repository.commit("Note again", {"notes.txt": "1\n"})
    command = "sh -c '[ ! -f broken.txt ] || exit 125; sh judge.sh {case}'"
    status, said = repository.script(
        "bisect_golden.sh", "gpt/zero1", "--good", good, "--case-command", command
    )
    assert status == 0 and f"fails since {fault[:7]}" in said, said


def test_bisection_by_the_values_of_one_commit(repository: Repository) -> None:
    """A change that renewed the golden values as well is found only by the older values."""
    moved = repository.commit("Move on", {"model.txt": "2\n", f"{CASE}/golden.txt": "2\n"})
    repository.commit("Note", {"notes.txt": "5\n"})
    command = ("--good", repository.first, "--case-command", "sh judge.sh {case}")
    assert repository.script("bisect_golden.sh", "gpt/zero1", *command)[0] == 2
    status, said = repository.script(
        "bisect_golden.sh", "gpt/zero1", *command, "--values-of", repository.first
    )
    assert status == 0 and f"fails since {moved[:7]}" in said, said


def test_what_a_change_touches() -> None:
    """A case's files touch it, schedules the cases with schedules, documents none, the core the default run."""
    cases = all_cases(ROOT)
    default = [name for name, is_default in cases.items() if is_default]
    assert 5 < len(default) < len(cases)
    assert touched_cases(cases, ["megatron/fsdp/layout.py"]) == default
    assert touched_cases(cases, ["docs/testing.md", "megatron/tools/show_mesh.py"]) == []
    own = touched_cases(cases, ["tests/functional/test_cases/gpt/zero1/golden_values_cpu.json"])
    assert own == ["gpt/zero1"]
    schedules = touched_cases(cases, ["megatron/parallel/pipeline/p2p.py"])
    assert schedules and all(
        any(word in name for word in ("gpipe", "1f1b", "interleaved", "zero-bubble")) for name in schedules
    )
    experts = touched_cases(cases, ["megatron/models/moe/router.py"])
    assert experts and not any(name.startswith("gpt/") for name in experts)


def test_autoformat_formats(tmp_path: Path) -> None:
    """And with --check says so and changes nothing."""
    path = tmp_path / "untidy.py"
    path.write_text("import sys\nimport os\nx = { 'a':1 }\nprint(os, sys, x)\n")
    script = str(ROOT / "scripts" / "autoformat.sh")
    before = path.read_text()
    done = subprocess.run([script, "--check", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert path.read_text() == before
    done = subprocess.run([script, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert path.read_text() == 'import os\nimport sys\n\nx = {"a": 1}\nprint(os, sys, x)\n'
