"""Checks the documentation against the tree: links and anchors, paths of our code, modules on the map.

    python scripts/check_docs.py

Exits with 1 and one line per fault if a Markdown file (README.md, docs/) links to a file or heading that
does not exist or names a path under megatron/, scripts/, tests/ or docs/ that does not exist, or if
docs/architecture.md leaves out a module of megatron/.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAP = ROOT / "docs" / "architecture.md"
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PATH = re.compile(r"`((?:megatron|scripts|tests|docs|requirements|data|benchmarks)/[\w./-]+)`")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
MADE_BY_RUNNING = ("runs/",)


def anchors(text: str) -> set[str]:
    """GitHub's anchors of the headings of a Markdown text."""
    headings = re.findall(r"^#+ +(.*)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def check_links(document: Path) -> list[str]:
    text = document.read_text(encoding="utf-8")
    name = document.relative_to(ROOT)
    faults = []
    for link in LINK.findall(FENCE.sub("", text)):
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", target) or target.startswith(MADE_BY_RUNNING):
            continue
        path = (document.parent / target).resolve() if target else document
        if not path.exists():
            faults.append(f"{name}: link to {link}, which does not exist")
        elif anchor and path.suffix == ".md" and anchor not in anchors(path.read_text(encoding="utf-8")):
            faults.append(f"{name}: link to {link}, no such heading")
    for path_text in PATH.findall(text):
        if not (ROOT / path_text).exists():
            faults.append(f"{name}: names {path_text}, which does not exist")
    return faults


def check_map() -> list[str]:
    """Every package of megatron/, and every module but private and __init__ ones, is on the map."""
    text = MAP.read_text(encoding="utf-8")
    words = set(re.findall(r"[\w.]+", text))
    faults = []
    for path in sorted((ROOT / "megatron").rglob("*.py")):
        name = path.parent.name if path.stem == "__init__" else path.stem
        if not path.stem.startswith("_") or path.stem == "__init__":
            found = {name, f"{name}.py"} & words
            in_table = path.parent.name == "tables"  # one line for all tables of flags
            if not found and not in_table:
                faults.append(f"docs/architecture.md: {path.relative_to(ROOT)} is not on the map")
    return faults


def main() -> int:
    documents = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
    faults = [fault for document in documents for fault in check_links(document)] + check_map()
    print(
        "\n".join(faults)
        if faults
        else f"{len(documents)} documents: links, paths and the map agree with the tree"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
