"""What the tables say of each flag is true of the tree."""

from __future__ import annotations

import re
from pathlib import Path

from megatron.train.arguments import document
from megatron.train.arguments.tables import flags

ROOT = Path(__file__).resolve().parents[3]


def test_working_flags_are_read_where_they_say() -> None:
    """No flag is accepted and silently ignored."""
    missing = []
    for flag in flags():
        if flag.status == "works":
            path = ROOT / flag.read_by
            text = path.read_text() if path.is_file() else ""
            if not re.search(rf"\b{flag.dest}\b", text):
                missing.append(f"{flag.name}: {flag.dest} does not occur in {flag.read_by}")
            if flag.test and not (ROOT / flag.test).is_file():
                missing.append(f"{flag.name}: no {flag.test}")
    assert not missing, "\n".join(missing)


def test_documentation_is_made_from_the_tables(tmp_path: Path) -> None:
    assert document.main(["--check"]) == 0, "run python -m megatron.train.arguments.document"
    stale = tmp_path / "flags.md"
    assert document.main(["--check", str(stale)]) == 1
    assert document.main([str(stale)]) == 0 and document.main(["--check", str(stale)]) == 0
    text = stale.read_text()
    for flag in flags():
        assert f"`{flag.name}`" in text
