"""preprocess_data and merge_datasets: what they write, whatever the number of processes, and what they refuse."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.tools import encode, merge_datasets, preprocess_data
from megatron.tools.text_input import input_files, read_pieces
from megatron.train.data.core_import import import_core_datasets
from tests.unit.train.data.corpora import unique_documents, write_corpus

REPOSITORY = Path(__file__).parents[3]
TEXTS = [f"Act {i}.\n" + "All the world's a stage. " * (i % 7) for i in range(1, 60)]


def write_lines(path: Path, texts: Sequence[Any], key: str = "text") -> Path:
    content = "".join(json.dumps({"id": i, key: text}) + "\n" for i, text in enumerate(texts)).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def preprocess(capsys: Any, *words: object) -> tuple[int, str]:
    """Run the command with bytes as tokens; return exit status and stderr."""
    capsys.readouterr()
    status = preprocess_data.main([*map(str, words), "--tokenizer-type", "ByteLevelTokenizer"])
    return status, capsys.readouterr().err


def read(prefix: Path | str) -> list[list[int]]:
    import_core_datasets()
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    assert len(dataset.document_indices) == len(dataset) + 1
    return [dataset[i].tolist() for i in range(len(dataset))]


def ids(texts: Sequence[str], eod: bool = True) -> list[list[int]]:
    return [list(text.encode()) + [256] * eod for text in texts]


@pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.jsonl.gz", "corpus.json"])
def test_json_lines(tmp_path: Path, capsys: Any, name: str) -> None:
    source = write_lines(tmp_path / name, TEXTS)
    assert (
        preprocess(capsys, "--input", source, "--output-prefix", tmp_path / "out" / "a", "--append-eod")[0]
        == 0
    )
    assert read(tmp_path / "out" / "a_text_document") == ids(TEXTS)
    assert sorted(os.listdir(tmp_path / "out")) == ["a_text_document.bin", "a_text_document.idx"]


def test_without_end_of_document(tmp_path: Path, capsys: Any) -> None:
    source = write_lines(tmp_path / "corpus.jsonl", TEXTS[:3])
    preprocess(capsys, "--input", source, "--output-prefix", tmp_path / "a")
    assert read(tmp_path / "a_text_document") == ids(TEXTS[:3], eod=False)


def test_output_does_not_depend_on_workers_and_partitions(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preprocess_data, "_BATCH_DOCUMENTS", 5)
    files = [write_lines(tmp_path / "a.jsonl", TEXTS[:20]), write_lines(tmp_path / "b.jsonl.gz", TEXTS[20:])]
    content = set()
    for workers, partitions in ((1, 1), (3, 1), (2, 2), (1, 3)):
        prefix = tmp_path / f"out{workers}{partitions}" / "x"
        words = ("--input", *files, "--output-prefix", prefix, "--append-eod")
        assert preprocess(capsys, *words, "--workers", workers, "--partitions", partitions)[0] == 0
        content.add(tuple(Path(f"{prefix}_text_document{end}").read_bytes() for end in (".bin", ".idx")))
        assert len(os.listdir(prefix.parent)) == 2
    assert len(content) == 1
    assert read(f"{prefix}_text_document") == ids(TEXTS)


def test_several_keys(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(
        "".join(json.dumps({"title": f"t{i}", "body": text}) + "\n" for i, text in enumerate(TEXTS))
    )
    words = ("--input", path, "--output-prefix", tmp_path / "a", "--json-keys", "title", "body")
    assert preprocess(capsys, *words)[0] == 0
    assert read(tmp_path / "a_title_document") == ids([f"t{i}" for i in range(len(TEXTS))], eod=False)
    assert read(tmp_path / "a_body_document") == ids(TEXTS, eod=False)


def test_plain_text(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "play.txt").write_text("to be\n\nor not\n---\nto be\n---\n---\nthat\n")
    words = ("--input", tmp_path / "play.txt", "--append-eod")
    preprocess(capsys, *words, "--output-prefix", tmp_path / "whole")
    assert read(tmp_path / "whole_text_document") == ids(["to be\n\nor not\n---\nto be\n---\n---\nthat\n"])
    preprocess(capsys, *words, "--output-prefix", tmp_path / "cut", "--document-separator=---")
    assert read(tmp_path / "cut_text_document") == ids(["to be\n\nor not\n", "to be\n", "that\n"])


def test_documents_without_text_are_left_out(tmp_path: Path, capsys: Any) -> None:
    source = write_lines(tmp_path / "corpus.jsonl", ["one", "", "two"])
    preprocess(capsys, "--input", source, "--output-prefix", tmp_path / "a", "--append-eod")
    assert read(tmp_path / "a_text_document") == ids(["one", "two"])


def test_glob_patterns_are_sorted(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.txt"):
        (tmp_path / name).write_text("x")
    assert [path.name for path in input_files([str(tmp_path / "*.jsonl")])] == ["a.jsonl", "b.jsonl"]


def test_progress_positions_reach_the_end(tmp_path: Path) -> None:
    files = [write_lines(tmp_path / "a.jsonl", TEXTS), write_lines(tmp_path / "b.jsonl.gz", TEXTS)]
    positions = [piece.position for piece in read_pieces(files)]
    assert positions == sorted(positions) and positions[-1] == sum(path.stat().st_size for path in files)


@pytest.mark.parametrize(
    ("size", "dtype"), [(259, np.uint16), (65499, np.uint16), (65500, np.int32), (2**17, np.int32)]
)
def test_two_bytes_where_they_fit(size: int, dtype: type) -> None:
    assert preprocess_data.token_dtype(size) is dtype


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ('{"text": "a"}\n{"text": \n', r"corpus\.jsonl, line 2 is not JSON"),
        ('{"text": "a"}\n["b"]\n', "line 2 is JSON but no object"),
        ('{"body": "a"}\n', r"line 1: the key text is missing \(found: body\); pass --json-keys"),
        ('{"text": 5}\n', "the key text is not text"),
        ("\n\n", "holds no text"),
        ('{"text": ""}\n', "holds no text under the key text"),
        (b'{"text": "\xff"}\n', "not UTF-8"),
    ],
)
def test_bad_content_is_refused_and_leaves_nothing(
    tmp_path: Path, capsys: Any, content: str | bytes, match: str
) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    (tmp_path / "out").mkdir()
    old = write_corpus(tmp_path / "out" / "a_text_document", [[1, 2, 3]])
    status, error = preprocess(capsys, "--input", path, "--output-prefix", tmp_path / "out" / "a")
    assert status == 2 and error.startswith("preprocess_data: ") and error.count("\n") == 1
    with pytest.raises(ValueError, match=match):
        raise ValueError(error)
    assert len(os.listdir(tmp_path / "out")) == 2 and read(old) == [[1, 2, 3]]  # as it was


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--input", "{tmp}/none.jsonl"], "--input .*none.jsonl: no such file"),
        (["--input", "{tmp}"], "is a folder"),
        (["--input", "{tmp}/empty.jsonl"], "empty.jsonl is empty"),
        (["--input", "{tmp}/broken.jsonl.gz"], "the file is broken"),
        (["--input", "{tmp}/good.jsonl", "--split-sentences"], "--split-sentences is not built here"),
        (["--input", "{tmp}/good.jsonl", "--workers", "0"], "--workers 0"),
        (
            ["--input", "{tmp}/good.jsonl", "--partitions", "9"],
            "--partitions 9: the input has only 2 documents",
        ),
        (["--input", "{tmp}/good.jsonl", "--output-prefix", "{tmp}/empty.jsonl/x"], "--output-prefix"),
        (["--input", "{tmp}/good.jsonl", "--tokenizer-type", "Nothing"], "--tokenizer-type Nothing"),
    ],
)
def test_bad_flags_are_refused(tmp_path: Path, capsys: Any, words: list[str], match: str) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "broken.jsonl.gz").write_bytes(write_lines(tmp_path / "x.gz", TEXTS).read_bytes()[:60])
    write_lines(tmp_path / "good.jsonl", ["a", "b"])
    defaults = ["--tokenizer-type", "ByteLevelTokenizer", "--output-prefix", str(tmp_path / "out")]
    status = preprocess_data.main(defaults + [word.replace("{tmp}", str(tmp_path)) for word in words])
    assert status == 2
    with pytest.raises(ValueError, match=match):
        raise ValueError(capsys.readouterr().err)


def die(*args: object) -> None:
    os._exit(9)


def test_a_killed_worker_ends_the_command(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_lines(tmp_path / "corpus.jsonl", TEXTS)
    monkeypatch.setattr(encode.Encoder, "encode", die)
    status, error = preprocess(
        capsys, "--input", source, "--output-prefix", tmp_path / "out" / "a", "--workers", 2
    )
    assert status == 1 and "a worker process was killed" in error
    assert not (tmp_path / "out").exists() or not os.listdir(tmp_path / "out")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_full_disk_is_named(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import_core_datasets()
    from megatron.core.datasets import indexed_dataset

    class FullDisk(indexed_dataset.IndexedDatasetBuilder):
        def __init__(self, path: str, dtype: Any) -> None:
            super().__init__("/dev/full", dtype)
            Path(path).write_bytes(b"half")

    monkeypatch.setattr(indexed_dataset, "IndexedDatasetBuilder", FullDisk)
    source = write_lines(tmp_path / "corpus.jsonl", TEXTS * 20)
    status, error = preprocess(capsys, "--input", source, "--output-prefix", tmp_path / "out" / "a")
    assert status == 1 and error == f"preprocess_data: {tmp_path / 'out' / 'a'}: No space left on device\n"
    assert not os.listdir(tmp_path / "out")


def test_command_line_says_nothing_but_its_result(tmp_path: Path) -> None:
    """In a process of its own: no warnings from anything that it imports."""
    source = write_lines(tmp_path / "corpus.jsonl", TEXTS)
    words = ["--input", source, "--output-prefix", tmp_path / "a", "--tokenizer-type", "ByteLevelTokenizer"]
    done = subprocess.run(
        [sys.executable, "-m", "megatron.tools.preprocess_data", *map(str, words)],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert f"--data-path {tmp_path / 'a_text_document'}" in done.stdout


def test_merge_keeps_every_document(tmp_path: Path, capsys: Any) -> None:
    """D07: document boundaries are offset; order is that of the names."""
    documents = unique_documents([3, 1, 5, 2, 4, 6])
    (tmp_path / "in").mkdir()
    for name, part in (("a", documents[:2]), ("b", documents[2:3]), ("c", documents[3:])):
        write_corpus(tmp_path / "in" / name, part)
    assert (
        merge_datasets.main(["--input", str(tmp_path / "in"), "--output-prefix", str(tmp_path / "all")]) == 0
    )
    assert read(tmp_path / "all") == documents
    assert "6 documents, 21 tokens" in capsys.readouterr().out
    prefixes = [str(tmp_path / "in" / name) for name in ("c", "a")]
    assert merge_datasets.main(["--input", *prefixes, "--output-prefix", str(tmp_path / "two")]) == 0
    assert read(tmp_path / "two") == documents[3:] + documents[:2]


def test_merge_beyond_two_to_the_31(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D06: pointers of a merged index are 64-bit. The 24 GB of holes are made, not copied."""
    import shutil

    from megatron.tools.indexed_output import merge
    from megatron.train.data.files import check_indexed_files
    from tests.unit.train.data.test_files import sparse_corpus

    def copy_as_hole(source: Any, target: Any) -> None:
        target.truncate(target.seek(0, os.SEEK_END) + os.fstat(source.fileno()).st_size)
        target.seek(0, os.SEEK_END)

    large = sparse_corpus(tmp_path / "large")
    monkeypatch.setattr(shutil, "copyfileobj", copy_as_hole)
    assert merge([large, large], str(tmp_path / "merged")) == (8, 2 * (3 * 2**30 + 100))
    assert check_indexed_files(str(tmp_path / "merged")).tokens == 2 * (3 * 2**30 + 100)


def test_bad_merges_are_refused(tmp_path: Path, capsys: Any) -> None:
    one = write_corpus(tmp_path / "one", [[1, 2]], np.int32)
    two = write_corpus(tmp_path / "two", [[1, 2]], np.uint16)
    (tmp_path / "nothing").mkdir()
    for inputs, output, match in (
        ([one, two], "out", "holds uint16 ids and .*one int32"),
        ([one, str(tmp_path / "none")], "out", "none.idx does not exist"),
        ([one, one], "one", "--output-prefix .*one is also an input"),
        ([str(tmp_path / "nothing")], "out", "--input names no"),
    ):
        assert merge_datasets.main(["--input", *inputs, "--output-prefix", str(tmp_path / output)]) == 2
        with pytest.raises(ValueError, match=match):
            raise ValueError(capsys.readouterr().err)
    assert read(one) == [[1, 2]]
