"""Commands in the documentation: training commands are legal for their ranks, tools run, other scripts have a test."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron.train.arguments import parse_args, validate
from tests.functional import runs
from tests.functional.cases import ROOT, Launch

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
SCRIPT = r"\.?/?(?:scripts/[\w./-]+|tests/[\w./-]+\.(?:sh|py)|\.ci/run)(?= |$)"
COMMAND = re.compile(rf"^(?:[A-Z_]+=\S+ )*(?:{SCRIPT}|(?:\.venv/bin/)?(?:python|torchrun)\b|srun\b)[^|`]*$")
PLACEHOLDER = re.compile(r"\.\.\.|\[|(?<=[ /])(?:N|[A-Z][A-Z_]+)\b(?!=)")
NOT_TESTED_HERE = {
    "quickstart.sh": "a stage of .ci/run",
    "test.sh": "runs these tests",
    "run": ".ci/run runs these tests",
}
# Tools with what to run in place of a document's files.
TOOLS = {
    "preprocess_data": "--input {root}/data/shakespeare.jsonl.gz --output-prefix text --append-eod --workers 1 "
    "--tokenizer-type SentencePieceTokenizer --tokenizer-model {root}/data/shakespeare_spm_2k.model "
    "--log-interval 1000000",
}
NEEDS_FILES = {"--input", "--load", "--output-prefix", "--hugging-face"}
"""A tool that is given files of the reader's must be named by a test, which has files of its own."""


@dataclass(frozen=True)
class Command:
    """A command of a document, its continuation lines joined."""

    document: str
    text: str

    @property
    def words(self) -> list[str]:
        """Without leading variables."""
        found = shlex.split(self.text, comments=True)
        while "=" in found[0] and not found[0].startswith(("-", ".", "/")):
            found.pop(0)
        return found

    @property
    def script(self) -> str:
        """Name of the script or module that it starts."""
        words = self.words
        if words[0].endswith("python") and words[1] == "-m":
            return words[2]
        return next((Path(word).name for word in words if word.endswith((".sh", ".py"))), Path(words[0]).name)

    @property
    def is_sketch(self) -> bool:
        """Whether something is to be filled in."""
        return bool(PLACEHOLDER.search(self.text))


def commands_of(document: Path) -> list[Command]:
    """Commands in fenced and in indented blocks."""
    found: list[Command] = []
    fenced = False
    lines = iter(document.read_text(encoding="utf-8").splitlines())
    for line in lines:
        if line.startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            text = line.strip()
            while text.endswith("\\"):
                text = text[:-1] + next(lines).strip()
            if COMMAND.match(text):
                found.append(Command(str(document.relative_to(ROOT)), text))
    return found


COMMANDS = [command for document in DOCUMENTS for command in commands_of(document)]
TRAINING = [
    command
    for command in COMMANDS
    if command.script.startswith("pretrain_")
    or (command.script == "torchrun.sh" and "pretrain_" in command.text)
]
RUN_TOOLS = [one for one in COMMANDS if one.script.startswith("megatron.tools.")]
OTHERS = [one for one in COMMANDS if one not in TRAINING and one not in RUN_TOOLS]
label = lambda command: f"{command.document}: {command.text[:60]}"


def launch_of(command: Command) -> Launch:
    """What a training command starts; a launch script is asked, not run: its `exec` prints the words instead."""
    words = command.words
    script = next((i for i, word in enumerate(words) if re.search(r"pretrain_\w+\.sh$", word)), None)
    if script is not None:
        program = 'exec() { printf "%s\\n" "$@"; exit 0; }; source "$0"'
        call = ["bash", "-c", program, str(ROOT / words[script]), *words[script + 1 :]]
        done = subprocess.run(call, capture_output=True, text=True, check=False, cwd=ROOT, timeout=60)
        words = done.stdout.splitlines()
        assert words, f"{command.text}: {done.stderr[-500:]}"
    main = next(i for i, word in enumerate(words) if re.search(r"pretrain_\w+\.py$", word))
    ranks = 1
    for flag in ("--nproc-per-node", "--nproc_per_node"):
        if flag in words[:main]:
            ranks = int(words[words.index(flag) + 1])
    if "torchrun.sh" in words[0]:
        ranks = int(words[1])
    declared = re.match(r"WORLD_SIZE=(\d+) ", command.text)
    return Launch(Path(words[main]).name, int(declared[1]) if declared else ranks, tuple(words[main + 1 :]))


@pytest.mark.parametrize("command", [one for one in TRAINING if not one.is_sketch], ids=label)
def test_a_training_command_is_legal(command: Command) -> None:
    launch = launch_of(command)
    validate(parse_args(runs.command_line(launch)), launch.ranks, "cpu")


@pytest.mark.parametrize("command", [one for one in TRAINING if one.is_sketch], ids=label)
def test_the_flags_of_a_sketch_exist(command: Command) -> None:
    from megatron.train.arguments.tables import flags

    known = {name for flag in flags() for name in (flag.name, *flag.aliases)} | {"--preset"}
    after = command.text.split("pretrain_", 1)[1]
    assert not set(re.findall(r"(?<= )--[\w-]+", after)) - known


@pytest.mark.parametrize("command", RUN_TOOLS, ids=label)
def test_a_tool_runs(command: Command, tmp_path: Path) -> None:
    words = command.words
    name = words[2].removeprefix("megatron.tools.")
    if name in TOOLS:
        given = TOOLS[name].format(root=ROOT).split()
        assert {word for word in words[3:] if word.startswith("--")} - set(given) <= {
            "--sort",
            "--tokenizer-name",
        }
    elif (
        command.is_sketch
        or NEEDS_FILES & set(words[3:])
        or any(word.endswith(".jsonl") for word in words[3:])
    ):
        assert named_by_a_test(f"tools.{name}") or named_by_a_test(name), f"no test names {name}"
        return
    else:
        given = words[3:]
    done = subprocess.run(
        [sys.executable, "-m", words[2], *given], cwd=tmp_path, capture_output=True, text=True, check=False,
        timeout=300, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("command", OTHERS, ids=label)
def test_every_other_script_has_a_test(command: Command) -> None:
    name = command.script
    if name not in NOT_TESTED_HERE:
        stem = name.rsplit(".", 1)[-1] if name.startswith(("megatron.", "tests.", "benchmarks.")) else name
        assert named_by_a_test(stem), f"{command.document}: {name} is run by no test"
    for word in command.words[:4]:
        if re.match(r"\.?/?(scripts|tests|\.ci)/", word):
            assert (ROOT / word).exists(), word


def named_by_a_test(name: str) -> bool:
    return any(name in path.read_text() for path in (ROOT / "tests").rglob("*.py"))


def test_commands_are_found() -> None:
    assert len(TRAINING) > 12 and len(RUN_TOOLS) >= 3 and len(OTHERS) > 8
    assert {command.document for command in COMMANDS} >= {"README.md", "docs/recipes.md", "docs/testing.md"}


RECIPES = [one for one in TRAINING if one.document == "docs/recipes.md" and "--validate-only" not in one.text]


@pytest.mark.full
def test_the_recipes_run() -> None:
    """All of them in their order: the resume needs what the run before it saved."""
    shutil.rmtree(ROOT / "runs" / "recipe", ignore_errors=True)
    for command in RECIPES:
        done = subprocess.run(
            ["bash", "-c", command.text], cwd=ROOT, capture_output=True, text=True, check=False, timeout=900
        )
        assert done.returncode == 0, f"{command.text}: {done.stdout[-1500:]}{done.stderr[-1500:]}"
        assert "lm loss:" in done.stdout
