"""The tree keeps the rules of docs/architecture.md: who imports whom, what may not exist, sizes, environment.

Everything is read from the source as an AST; nothing of the project is imported.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
Check = Callable[[str, str], list[str]]

OURS = ("fsdp", "parallel", "models", "train", "tools")

# The table "Who may import whom" of docs/architecture.md.
MAY_IMPORT_OURS = {
    "fsdp": {"fsdp"},
    "parallel": {"parallel"},
    "models": {"parallel", "models"},
    "train": {"parallel", "models", "fsdp", "train"},
    "tools": set(OURS),
    "pretrain": {"parallel", "models", "fsdp", "train"},  # tools are imported by nothing
}
# Optional or foreign package -> path prefixes that may import it.
ONLY_IMPORTED_BY = {
    "megatron.core": ("megatron/fsdp/mcore.py", "megatron/train/data/", "megatron/tools/", "pretrain_"),
    "transformer_engine": ("megatron/models/backends/transformer_engine/",),
    "transformer_engine_torch": ("megatron/models/backends/transformer_engine/",),
    "apex": ("megatron/train/optimizer.py",),
    "deep_ep": ("megatron/parallel/expert/deepep.py",),
}
TORCH_ONLY = ("megatron/fsdp/", "megatron/parallel/")
MUST_BE_PURE = (
    "megatron/fsdp/layout.py",
    "megatron/parallel/context/balance.py",
    "megatron/parallel/context/merge.py",
    "megatron/parallel/expert/permute.py",
    "megatron/parallel/pipeline/actions.py",
    "megatron/parallel/pipeline/lower.py",
    "megatron/parallel/pipeline/schedules.py",
    "megatron/parallel/pipeline/simulator.py",
    "megatron/parallel/pipeline/stages.py",
)
MAY_READ_ENVIRONMENT = ("megatron/train/initialize.py", "megatron/tools/", "scripts/", "setup.py")
FORBIDDEN = (
    "__init__.py",  # would hide megatron.core
    "core",
    "training",
    "inference",
    "bridge",
    "energon",
)

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 6
# path or path::function -> why it may exceed a limit.
ALLOWED_SIZES: dict[str, str] = {}
ALLOWED_PARAMETERS = {
    "megatron/models/backends/": "Transformer Engine's constructor and forward signatures",
    "megatron/fsdp/api.py::fully_shard": "torch's signature of it, and strategy",
    "megatron/models/gpt.py::forward": "a model call: Megatron's arguments of it",
    "megatron/parallel/context/attention.py::context_parallel_attention": "the operands and options of attention",
    "megatron/train/data/index_helpers.py::build_sample_idx_int32": "megatron-core's signature",
}


def source_files() -> list[Path]:
    folders = [ROOT / "megatron", ROOT / "scripts"]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    return sorted([*files, *ROOT.glob("*.py")])


def imported_names(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, nested ones and literal import_module() calls included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *([base] if base else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def import_violations(path: str, source: str) -> list[str]:
    """Broken import rules of one file. `path` is relative to the repository."""
    tree = ast.parse(source)
    parts = Path(path).with_suffix("").parts
    package = ".".join(parts[:-1])
    home = parts[1] if parts[0] == "megatron" else "pretrain" if path.startswith("pretrain_") else None
    found = []
    for line, name in imported_names(tree, package):
        for foreign, prefixes in ONLY_IMPORTED_BY.items():
            if is_within(name, foreign) and not path.startswith(prefixes):
                found.append(f"{path}:{line}: imports {name}; only {', '.join(prefixes)} may")
        for ours in OURS:
            if is_within(name, f"megatron.{ours}") and home and ours not in MAY_IMPORT_OURS[home]:
                found.append(
                    f"{path}:{line}: {home} imports {name}; it may import {sorted(MAY_IMPORT_OURS[home])}"
                )
        root = name.split(".")[0]
        allowed = root in sys.stdlib_module_names or root in ("torch", "megatron", *ONLY_IMPORTED_BY)
        if path.startswith(TORCH_ONLY) and not allowed:
            found.append(f"{path}:{line}: imports {name}; fsdp and parallel use torch only")
    return found


def purity_violations(path: str, source: str) -> list[str]:
    """A module whose docstring says PURE (or that must) imports or touches torch.distributed."""
    tree = ast.parse(source)
    pure = "PURE" in (ast.get_docstring(tree) or "")
    if not pure:
        return [f"{path}: its docstring must mark it PURE"] if path in MUST_BE_PURE else []
    package = ".".join(Path(path).parts[:-1])
    found = [
        f"{path}:{line}: PURE, but imports {name}"
        for line, name in imported_names(tree, package)
        if is_within(name, "torch.distributed")
    ]
    found += [
        f"{path}:{node.lineno}: PURE, but uses torch.distributed"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed"
    ]
    return found


def environment_violations(path: str, source: str) -> list[str]:
    if path.startswith(MAY_READ_ENVIRONMENT):
        return []
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in (
            "os.environ",
            "os.getenv",
            "os.environb",
        ):
            found.append(f"{path}:{node.lineno}: reads the environment; only train/initialize.py may")
        from_os = isinstance(node, ast.ImportFrom) and node.module == "os"
        if from_os and {alias.name for alias in node.names} & {"environ", "getenv", "environb"}:
            found.append(f"{path}:{node.lineno}: imports the environment; only train/initialize.py may")
    return found


def function_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, without the docstring."""
    total = (node.end_lineno or node.lineno) - node.lineno + 1
    if ast.get_docstring(node) is not None:
        docstring = node.body[0]
        total -= (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
    return total


def parameter_count(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Parameters but self, cls, *args and **kwargs."""
    arguments = node.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"], ["ctx"]))


def size_violations(path: str, source: str) -> list[str]:
    """Files, functions and parameter lists over the limits that no allow-list names."""
    found = []
    lines = source.count("\n")
    if lines > MAX_FILE_LINES and path not in ALLOWED_SIZES:
        found.append(f"{path}: {lines} lines, the limit is {MAX_FILE_LINES}")
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        where = f"{path}::{node.name}"
        if function_lines(node) > MAX_FUNCTION_LINES and where not in ALLOWED_SIZES:
            found.append(f"{where}: {function_lines(node)} lines, the limit is {MAX_FUNCTION_LINES}")
        allowed = where in ALLOWED_PARAMETERS or path.startswith(
            tuple(k for k in ALLOWED_PARAMETERS if k.endswith("/"))
        )
        if parameter_count(node) > MAX_PARAMETERS and not allowed:
            found.append(f"{where}: {parameter_count(node)} parameters, the limit is {MAX_PARAMETERS}")
    return found


def checked(check: Check, path: Path) -> list[str]:
    name = path.relative_to(ROOT).as_posix()
    try:
        return check(name, path.read_text(encoding="utf-8"))
    except SyntaxError as error:
        return [f"{name}:{error.lineno}: {error.msg}"]


CHECKS: list[Check] = [import_violations, purity_violations, environment_violations, size_violations]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_tree_keeps_the_rules(check: Check) -> None:
    files = source_files()
    assert files
    found = [text for path in files for text in checked(check, path)]
    assert not found, "\n" + "\n".join(found)


def test_namespace_is_left_to_others() -> None:
    present = [name for name in FORBIDDEN if (ROOT / "megatron" / name).exists()]
    assert not present, (
        f"megatron/ must not hold {present}: other distributions ship them, or they hide megatron.core"
    )
    loose = [path.name for path in (ROOT / "megatron").glob("*.py")]
    assert not loose, f"modules directly in megatron/: {loose}"


def test_allow_lists_name_what_exists() -> None:
    for entry in (*ALLOWED_SIZES, *ALLOWED_PARAMETERS):
        path, _, function = entry.partition("::")
        assert (ROOT / path).exists(), f"{entry}: no such file any more"
        assert not function or f"def {function}(" in (ROOT / path).read_text(), (
            f"{entry}: no such function any more"
        )


BAD = [
    (import_violations, "megatron/fsdp/a.py", "from megatron.parallel import mesh"),
    (import_violations, "megatron/fsdp/a.py", "def f():\n    import megatron.core.tensor_parallel"),
    (import_violations, "megatron/fsdp/a.py", "import numpy"),
    (import_violations, "megatron/parallel/a.py", "from ..models import gpt"),
    (import_violations, "megatron/models/a.py", "from megatron import fsdp"),
    (import_violations, "megatron/models/gpt.py", "import transformer_engine.pytorch as te"),
    (
        import_violations,
        "megatron/models/a.py",
        "import importlib\nimportlib.import_module('megatron.train.step')",
    ),
    (import_violations, "megatron/train/loop.py", "from megatron.core import parallel_state"),
    (import_violations, "megatron/train/loop.py", "from apex.optimizers import FusedAdam"),
    (import_violations, "megatron/train/loop.py", "from megatron.tools import preprocess_data"),
    (import_violations, "pretrain_gpt.py", "from megatron.tools import generate_text"),
    (purity_violations, "megatron/fsdp/layout.py", '"""Shapes. PURE."""\nimport torch.distributed as dist'),
    (purity_violations, "megatron/fsdp/x.py", '"""PURE."""\nimport torch\nx = torch.distributed.get_rank()'),
    (purity_violations, "megatron/fsdp/layout.py", '"""Unmarked."""'),
    (environment_violations, "megatron/train/loop.py", "import os\nx = os.environ['RANK']"),
    (environment_violations, "megatron/fsdp/a.py", "from os import getenv"),
    (size_violations, "megatron/fsdp/a.py", "x = 1\n" * 401),
    (size_violations, "megatron/fsdp/a.py", "def f():\n" + "    x = 1\n" * 60),
    (size_violations, "megatron/fsdp/a.py", "def f(self, a, b, c, d, e, f, g): pass"),
]
GOOD = [
    (import_violations, "megatron/fsdp/mcore.py", "from megatron.core import parallel_state"),
    (
        import_violations,
        "megatron/train/data/gpt.py",
        "from megatron.core.datasets.gpt_dataset import GPTDataset",
    ),
    (import_violations, "megatron/train/build.py", "from megatron.fsdp import FullyShardedDataParallel"),
    (
        import_violations,
        "megatron/models/backends/transformer_engine/layers.py",
        "import transformer_engine.pytorch",
    ),
    (environment_violations, "megatron/train/initialize.py", "import os\nx = os.environ['RANK']"),
    (
        size_violations,
        "megatron/fsdp/a.py",
        'def f(self, a, b, c, d, e, f, *args):\n    """\n' + "\n" * 70 + '    """',
    ),
]


@pytest.mark.parametrize(("check", "path", "source"), BAD)
def test_check_notices(check: Check, path: str, source: str) -> None:
    assert check(path, source)


@pytest.mark.parametrize(("check", "path", "source"), GOOD)
def test_check_allows(check: Check, path: str, source: str) -> None:
    assert not check(path, source)
