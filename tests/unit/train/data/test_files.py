"""Bad .bin/.idx files: one clear ValueError each."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest

from megatron.train.data.files import check_indexed_files, check_vocabulary
from tests.unit.train.data.corpora import unique_documents, write_corpus

HEADER = struct.Struct("<9sQBQQ")


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write_corpus(tmp_path / "corpus", unique_documents([5, 3, 7]))


def edit(path: str, offset: int, content: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(content)


def test_good_files_are_described(prefix: str) -> None:
    files = check_indexed_files(prefix)
    assert (files.sequences, files.documents, files.tokens, files.dtype) == (3, 3, 15, np.int32)


def test_fingerprint_follows_the_content(prefix: str, tmp_path: Path) -> None:
    same = write_corpus(tmp_path / "moved", unique_documents([5, 3, 7]))
    other = write_corpus(tmp_path / "other", unique_documents([5, 7, 3]))
    of = lambda path: check_indexed_files(path).fingerprint
    assert of(prefix) == of(same) != of(other)


def test_missing_files(prefix: str, tmp_path: Path) -> None:
    os.remove(prefix + ".bin")
    with pytest.raises(ValueError, match=r"--data-path .*corpus\.bin does not exist"):
        check_indexed_files(prefix)
    with pytest.raises(ValueError, match=r"--train-data-path .*none\.idx does not exist"):
        check_indexed_files(str(tmp_path / "none"), "--train-data-path")


def test_wrong_name_gets_a_hint(prefix: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"pass the prefix without \.bin: .*corpus$"):
        check_indexed_files(prefix + ".bin")
    write_corpus(tmp_path / "play_text_document", [[1, 2]])
    with pytest.raises(ValueError, match=r"did you mean .*play_text_document\?"):
        check_indexed_files(str(tmp_path / "play"))


@pytest.mark.parametrize("size", [0, 5, 20, 33, 40, 80])
def test_truncated_index(prefix: str, size: int) -> None:
    os.truncate(prefix + ".idx", size)
    with pytest.raises(ValueError, match=r"corpus\.idx is (truncated|no Megatron index).*preprocess_data"):
        check_indexed_files(prefix)


def test_wrong_magic_version_and_dtype(prefix: str) -> None:
    edit(prefix + ".idx", 9, struct.pack("<Q", 7))
    with pytest.raises(ValueError, match="format version 7"):
        check_indexed_files(prefix)
    edit(prefix + ".idx", 9, struct.pack("<QB", 1, 99))
    with pytest.raises(ValueError, match="dtype code 99"):
        check_indexed_files(prefix)
    edit(prefix + ".idx", 0, b"GARBAGE!!")
    with pytest.raises(ValueError, match="no Megatron index"):
        check_indexed_files(prefix)


@pytest.mark.parametrize(("change", "what"), [(-4, "truncated"), (4, "longer than its index says")])
def test_data_do_not_match_the_index(prefix: str, change: int, what: str) -> None:
    os.truncate(prefix + ".bin", os.path.getsize(prefix + ".bin") + change)
    with pytest.raises(ValueError, match=rf"corpus\.bin is {what}"):
        check_indexed_files(prefix)


def test_index_longer_than_it_says(prefix: str) -> None:
    with open(prefix + ".idx", "ab") as file:
        file.write(b"\0" * 64)
    with pytest.raises(ValueError, match="longer than it says"):
        check_indexed_files(prefix)


def test_empty_corpora(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no documents"):
        check_indexed_files(write_corpus(tmp_path / "nothing", []))
    with pytest.raises(ValueError, match="holds no tokens"):
        check_indexed_files(write_corpus(tmp_path / "blank", [[], []]))


def test_negative_length(prefix: str) -> None:
    edit(prefix + ".idx", HEADER.size, struct.pack("<i", -5))
    with pytest.raises(ValueError, match="negative lengths"):
        check_indexed_files(prefix)


@pytest.mark.parametrize(("index", "value"), [(3, 2), (0, 1), (1, 3)])
def test_document_boundaries_that_a_merge_did_not_offset(prefix: str, index: int, value: int) -> None:
    """D07."""
    edit(prefix + ".idx", HEADER.size + 3 * 12 + index * 8, struct.pack("<q", value))
    with pytest.raises(ValueError, match="document boundaries"):
        check_indexed_files(prefix)


def test_pointer_that_overflowed_32_bits(tmp_path: Path) -> None:
    """D06: a writer with 32-bit pointers."""
    prefix = sparse_corpus(tmp_path / "large")
    assert check_indexed_files(prefix).tokens == 3 * 2**30 + 100
    edit(prefix + ".idx", HEADER.size + 4 * 4 + 3 * 8, struct.pack("<q", (3 * 2**30 * 4) % 2**32 - 2**31))
    with pytest.raises(ValueError, match="32-bit overflow"):
        check_indexed_files(prefix)


def test_more_documents_than_an_index_can_address(tmp_path: Path) -> None:
    """D06: refused by the count, before anything of that size is read."""
    count = 2**31
    with open(tmp_path / "many.idx", "wb") as file:
        file.write(HEADER.pack(b"MMIDIDX\x00\x00", 1, 4, count, 2))
        file.truncate(HEADER.size + 12 * count + 16)
    (tmp_path / "many.bin").touch()
    with pytest.raises(ValueError, match="2147483648 documents, more than the 2147483647"):
        check_indexed_files(str(tmp_path / "many"))


def test_vocabulary_smaller_than_the_ids(prefix: str) -> None:
    files = check_indexed_files(prefix)
    check_vocabulary(files, 16)
    with pytest.raises(
        ValueError, match=r"holds the token id 15, but the vocabulary has 15 ids.*--tokenizer"
    ):
        check_vocabulary(files, 15)


def test_negative_ids(tmp_path: Path) -> None:
    files = check_indexed_files(write_corpus(tmp_path / "corpus", [[1, -2, 3]]))
    with pytest.raises(ValueError, match="token id -2"):
        check_vocabulary(files, 16)


def sparse_corpus(prefix: Path) -> str:
    """Return a corpus of 12 GB, all of it holes except the 100 tokens of its last document."""
    from megatron.core.datasets.indexed_dataset import _IndexWriter

    lengths = [2**30, 2**30, 2**30, 100]
    with _IndexWriter(f"{prefix}.idx", np.int32) as writer:
        writer.write(lengths, None, [0, 1, 2, 3, 4])
    with open(f"{prefix}.bin", "wb") as file:
        file.seek(4 * 3 * 2**30)
        file.write(np.arange(1, 101, dtype=np.int32).tobytes())
    return str(prefix)
