"""Which functional cases a change touches. PURE but for listing the cases.

A case's name says its features (tests/functional/features.py); a file says its features by where it lies. A change of
a case's own files touches that case; a change of code that every run executes touches the cases of the default run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

CASES = "tests/functional/test_cases"
# (files, cases): the first pattern that fits a file decides. None: the cases of the default run.
RULES: tuple[tuple[str, str | None], ...] = (
    (r"docs/|.*\.md$|CODEOWNERS|\.github/|scripts/release/|tests/unit/", "(?!)"),
    (r"megatron/parallel/pipeline/|megatron/train/pipeline", r"gpipe|1f1b|interleaved|zero-bubble"),
    (r"megatron/parallel/context/", r"p2p|a2a|all_gather"),
    (r"megatron/parallel/expert/|megatron/models/moe/", r"^mixtral/|^deepseek/"),
    (r"megatron/models/(deepseek|mla|mtp)|pretrain_deepseek", r"^deepseek/"),
    (r"megatron/models/backends/transformer_engine/|tests/te/", r"(/|-)te-"),
    (r"megatron/parallel/(tensor|sequence|replicated|query_groups|loss)", r"tp2"),
    (r"megatron/train/(checkpoint|resume)|megatron/fsdp/checkpoint", r"resume"),
    (r"megatron/train/loss_scale|megatron/fsdp/precision", r"bf16"),
    (r"megatron/tools/|benchmarks/", "(?!)"),
    (r"megatron/|pretrain_|setup\.py|requirements/|scripts/|tests/", None),
)


def config_of(case: str) -> str:
    """The file that makes a folder a case."""
    return f"{CASES}/{case}/model_config.yaml"


def all_cases(root: Path) -> dict[str, bool]:
    """Names of all cases, and whether each belongs to the default run."""
    files = sorted((root / CASES).rglob("model_config.yaml"))
    is_default = re.compile(r"^DEFAULT:\s*true", re.MULTILINE)
    top = root / CASES
    return {str(path.parent.relative_to(top)): bool(is_default.search(path.read_text())) for path in files}


def touched_cases(cases: dict[str, bool], changed: Iterable[str]) -> list[str]:
    """Names of the cases that a change of files `changed` touches, sorted."""
    chosen: set[str] = set()
    for name in changed:
        own = [case for case in cases if name.startswith(f"{CASES}/{case}/")]
        if own:
            chosen.update(own)
            continue
        pattern = next((wanted for files, wanted in RULES if re.match(files, name)), "(?!)")
        if pattern is None:
            chosen.update(case for case, default in cases.items() if default)
        else:
            chosen.update(case for case in cases if re.search(pattern, case))
    return sorted(chosen)
