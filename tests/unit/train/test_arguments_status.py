"""What the tables say of each flag is true of the tree."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from megatron.train.arguments import document
from megatron.train.arguments.tables import flags

ROOT = Path(__file__).resolve().parents[3]


@cache
def names_in(path: Path) -> frozenset[str]:
    """Attributes, names, fields, keywords and whole strings of a module; of f-strings the constant end."""
    found: set[str] = set()
    if not path.is_file():
        return frozenset()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case (
                ast.Attribute(attr=name) | ast.Name(id=name) | ast.keyword(arg=str(name)) | ast.arg(arg=name)
            ):
                found.add(name)
            case ast.Constant(value=str(text)):
                found.add(text)
            case ast.JoinedStr(values=[*_, ast.Constant(value=str(text))]):
                found.add("*" + text)
    return frozenset(found)


def is_read(dest: str, names: frozenset[str]) -> bool:
    return dest in names or any(name[0] == "*" and dest.endswith(name[1:]) for name in names if len(name) > 6)


def test_working_flags_are_read_where_they_say() -> None:
    """No flag is accepted and silently ignored: comments and docstrings do not count as reading."""
    wrong = []
    for flag in flags():
        if flag.status == "works" and not is_read(flag.dest, names_in(ROOT / flag.read_by)):
            wrong.append(f"{flag.name}: {flag.dest} is not read in {flag.read_by}")
        if flag.test and not (ROOT / flag.test).is_file():
            wrong.append(f"{flag.name}: there is no {flag.test}")
    assert not wrong, "\n".join(wrong)


def test_reading_is_told_from_mentioning(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text('"""Reads alpha."""\n# beta\nx = config.gamma + get("delta") + get(f"{y}_epsilon")\n')
    names = names_in(module)
    assert [is_read(dest, names) for dest in ("alpha", "beta", "gamma", "delta", "my_epsilon")] == [
        False, False, True, True, True,
    ]  # fmt: skip


def test_documentation_is_made_from_the_tables(tmp_path: Path) -> None:
    assert document.main(["--check"]) == 0, "run python -m megatron.train.arguments.document"
    stale = tmp_path / "flags.md"
    assert document.main(["--check", str(stale)]) == 1
    assert document.main([str(stale)]) == 0 and document.main(["--check", str(stale)]) == 0
    text = stale.read_text()
    for flag in flags():
        assert f"`{flag.name}`" in text
