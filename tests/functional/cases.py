"""Functional cases as their YAML files say them, and the words of the commands that run them.

    python -m tests.functional.cases CASE --output FOLDER [--platform cpu|gpu]

prints the launches of a case as shell statements for run_case.sh. Needs neither torch nor megatron.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.functional.features import STEPS, words

ROOT = Path(__file__).resolve().parents[2]
CASES = ROOT / "tests" / "functional" / "test_cases"
TEST_TYPES = ("regular", "ckpt-resume", "reshard-resume")
ONE_RANK_STEPS = max(STEPS.values())
KEYS = {
    "FEATURES", "DEFAULT", "TEST_TYPE", "SCRIPT", "RANKS", "RANKS_2", "ENV_VARS", "MODEL_ARGS", "MODEL_ARGS_2",
    "METRICS", "CPU_HOOKS", "NO_ONE_RANK",
}  # fmt: skip
# What places a model on ranks, chooses an implementation or handles checkpoints: the one-rank run has none of it.
LAYOUT_FLAGS = frozenset(
    """--use-megatron-fsdp --data-parallel-sharding-strategy --num-distributed-optimizer-instances
    --outer-dp-sharding-strategy --tensor-model-parallel-size --sequence-parallel --pipeline-model-parallel-size
    --pipeline-schedule --num-virtual-stages-per-pipeline-rank --delay-wgrad-compute --context-parallel-size
    --cp-comm-type --hierarchical-context-parallel-sizes --expert-model-parallel-size --expert-tensor-parallel-size
    --moe-token-dispatcher-type --moe-flex-dispatcher-backend --no-gradient-accumulation-fusion
    --transformer-impl --attention-backend --recompute-granularity --recompute-method --recompute-num-layers
    --save --save-interval --load --ckpt-step
    """.split()
)


@dataclass(frozen=True)
class Launch:
    """One command: `torchrun --nproc-per-node ranks script words`. `{output}` stands for the run's folder."""

    script: str
    ranks: int
    words: tuple[str, ...]

    def in_folder(self, folder: str | Path) -> Launch:
        """With the run's folder filled in."""
        return Launch(
            self.script, self.ranks, tuple(word.replace("{output}", str(folder)) for word in self.words)
        )


@dataclass(frozen=True)
class Case:
    """One case.

    Attributes:
        name: model/case, its folder below test_cases.
        test_type: regular; ckpt-resume (run 2 continues run 1's middle checkpoint and must repeat its later steps bit
            for bit); reshard-resume (the same in another layout, within tolerances).
        launches: one, or two.
        metrics: names in the golden file.
        cpu_hooks: of hooks.py, for runs on CPU.
        no_one_rank: why this case has no one-rank run to be compared with; empty: it has.
    """

    name: str
    test_type: str
    launches: tuple[Launch, ...]
    metrics: tuple[str, ...]
    default: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    cpu_hooks: str = ""
    no_one_rank: str = ""
    flags: dict[str, Any] = field(default_factory=dict)
    features: dict[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Where its files are."""
        return CASES / self.name

    @property
    def precision(self) -> str:
        """Of the computation: fp32 or bf16."""
        return "bf16" if "--bf16" in self.flags else "fp32"

    @property
    def one_rank(self) -> Launch:
        """The same model, data and optimizer on one rank, with the torch backend and nothing sharded."""
        kept = {flag: value for flag, value in self.flags.items() if flag not in LAYOUT_FLAGS}
        kept["--transformer-impl"] = "local"
        if kept.get("--lr-decay-style") == "constant":
            kept["--train-iters"] = (
                ONE_RANK_STEPS  # a step does not depend on how many follow: one run for all
            )
        return Launch(self.launches[0].script, 1, tuple(words(kept)))

    @property
    def one_rank_key(self) -> str:
        """Hash of the one-rank run's command."""
        launch = self.one_rank
        return hashlib.sha256(json.dumps([launch.script, launch.words]).encode()).hexdigest()[:16]


def load(name: str) -> Case:
    """The case of a folder below test_cases, or of a path to one. ValueError for what is no case."""
    folder = Path(name) if Path(name).is_dir() else CASES / name
    path = folder / "model_config.yaml"
    if not path.exists():
        raise ValueError(f"{name} is no case: {path} does not exist; there are {', '.join(names())}")
    content = yaml.safe_load(path.read_text())
    unknown = set(content) - KEYS
    if unknown or content.get("TEST_TYPE") not in TEST_TYPES:
        raise ValueError(
            f"{path}: unknown {sorted(unknown)}, or TEST_TYPE is none of {', '.join(TEST_TYPES)}"
        )
    ranks = content["RANKS"]
    launches = [Launch(content["SCRIPT"], ranks, tuple(words(content["MODEL_ARGS"])))]
    if content["TEST_TYPE"] != "regular":
        second = tuple(words(content["MODEL_ARGS_2"]))
        launches.append(Launch(content["SCRIPT"], content.get("RANKS_2", ranks), second))
    return Case(
        name=str(folder.resolve().relative_to(CASES)),
        test_type=content["TEST_TYPE"],
        launches=tuple(launches),
        metrics=tuple(content["METRICS"]),
        default=content.get("DEFAULT", False),
        environment={key: str(value) for key, value in content.get("ENV_VARS", {}).items()},
        cpu_hooks=content.get("CPU_HOOKS", ""),
        no_one_rank=content.get("NO_ONE_RANK", ""),
        flags=content["MODEL_ARGS"],
        features=content.get("FEATURES", {}),
    )


@functools.cache
def names() -> tuple[str, ...]:
    """All cases, by name."""
    return tuple(sorted(str(path.parent.relative_to(CASES)) for path in CASES.glob("*/*/model_config.yaml")))


@functools.cache
def all_cases() -> tuple[Case, ...]:
    """All cases, by name."""
    return tuple(load(name) for name in names())


def shell(case: Case, output: str, platform: str) -> str:
    """Shell statements: exports, and functions `launch_1` and, for resumes, `launch_2`."""
    lines = [f"export {key}={shlex.quote(value)}" for key, value in case.environment.items()]
    hooks = case.cpu_hooks if platform == "cpu" else ""
    if hooks:
        # What else is to be hooked in, a planted fault say, may be there already.
        lines.append(
            f'export FUNCTIONAL_TEST_HOOKS="{hooks}${{FUNCTIONAL_TEST_HOOKS:+,$FUNCTIONAL_TEST_HOOKS}}"'
        )
    lines.append(f"number_of_launches={len(case.launches)}")
    for number, launch in enumerate(case.launches, 1):
        launch = launch.in_folder(output)
        command = [*launch.words, "--metrics-file", f"{output}/metrics_{number}.jsonl"]
        lines.append(f"ranks_{number}={launch.ranks} script_{number}={launch.script}")
        lines.append(f"words_{number}=({shlex.join(command)})")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("case", nargs="?", help="folder below tests/functional/test_cases; none: list them")
    parser.add_argument("--output", default="runs/functional")
    parser.add_argument("--platform", choices=("cpu", "gpu"), default="cpu")
    options = parser.parse_args()
    if options.case is None:
        print("\n".join(f"{case.name}{' *' if case.default else ''}" for case in all_cases()))
        return 0
    try:
        print(shell(load(options.case), options.output, options.platform))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
