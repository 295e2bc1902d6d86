"""Reads corpora for preprocess_data: JSON lines and plain text, gzipped or not."""

from __future__ import annotations

import glob
import gzip
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_TEXT_SUFFIXES = (".txt", ".text")


@dataclass(frozen=True)
class Piece:
    """One document, not yet parsed.

    Attributes:
        source: "file, line n", for messages.
        raw: the line of JSON, or the text itself.
        is_json: which of the two.
        position: bytes of all input read so far (compressed bytes where gzipped), for progress.
    """

    source: str
    raw: bytes
    is_json: bool
    position: int


def input_files(patterns: Sequence[str]) -> list[Path]:
    """Return the files that --input names: paths or glob patterns, in this order, matches of a pattern
    sorted.

    Raises:
        ValueError: nothing there, a folder, or an empty file.
    """
    files: list[Path] = []
    for pattern in patterns:
        found = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern))
        if not found:
            raise ValueError(f"--input {pattern}: no such file; pass .jsonl, .jsonl.gz or .txt files")
        for name in found:
            path = Path(name)
            if path.is_dir():
                raise ValueError(f"--input {name} is a folder: pass its files, such as '{name}/*.jsonl'")
            if path.stat().st_size == 0:
                raise ValueError(f"--input {name} is empty: pass a file with text, or leave it out")
            files.append(path)
    return files


def read_pieces(files: Sequence[Path], separator: str | None = None) -> Iterator[Piece]:
    """Yield the documents of ``files``.

    A name with .txt (or .txt.gz) is plain text: the whole file is one document or, with ``separator``, one
    begins after each line that equals it. Everything else is JSON, one document per line; blank lines are
    skipped.

    Raises:
        ValueError: a broken gzip file.
    """
    before = 0
    for path in files:
        with open(path, "rb") as raw:
            try:
                lines = gzip.GzipFile(fileobj=raw) if raw.peek(2)[:2] == b"\x1f\x8b" else raw
                reader = _text if _is_text(path) else _json_lines
                for source, content in reader(path, lines, separator):
                    yield Piece(source, content, reader is _json_lines, before + raw.tell())
            except (EOFError, gzip.BadGzipFile, OSError) as error:
                raise ValueError(f"--input {path}: the file is broken ({error}); fetch it again") from None
        before += path.stat().st_size


def _is_text(path: Path) -> bool:
    name = path.name.removesuffix(".gz")
    return name.endswith(_TEXT_SUFFIXES)


def _json_lines(
    path: Path, lines: BinaryIO | gzip.GzipFile, separator: str | None
) -> Iterator[tuple[str, bytes]]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield f"{path}, line {number}", line


def _text(path: Path, lines: BinaryIO | gzip.GzipFile, separator: str | None) -> Iterator[tuple[str, bytes]]:
    if separator is None:
        yield str(path), lines.read()
        return
    mark, begin, document = separator.encode(), 1, []
    for number, line in enumerate(lines, start=1):
        if line.strip() != mark:
            document.append(line)
            continue
        if document:
            yield f"{path}, line {begin}", b"".join(document)
        begin, document = number + 1, []
    if document:
        yield f"{path}, line {begin}", b"".join(document)
