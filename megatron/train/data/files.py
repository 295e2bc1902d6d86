"""Checks of .bin/.idx pairs before anything reads them: each fault one ValueError with file and fix."""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document boundaries
_DTYPES = {
    1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32,
    8: np.uint16,
}  # fmt: skip
_MAX_SEQUENCES = 2**31 - 1
_SCAN_TOKENS = 1 << 24
_SCAN_BLOCKS = 64
_REBUILD = "make it again with python -m megatron.tools.preprocess_data"


@dataclass(frozen=True)
class IndexedFiles:
    """What a .bin/.idx pair holds.

    Attributes:
        prefix: path without .bin or .idx.
        dtype: of the token ids.
        sequences, documents, tokens: counts. preprocess_data writes one sequence per document.
        fingerprint: short hash of the index (its ends, where it is large) and the size of the data.
    """

    prefix: str
    dtype: np.dtype
    sequences: int
    documents: int
    tokens: int
    fingerprint: str


def check_indexed_files(prefix: str, flag: str = "--data-path") -> IndexedFiles:
    """Check the pair at ``prefix``, given by ``flag``, in a time that hardly depends on its size.

    Raises:
        ValueError: a file is missing, truncated, not of this format, empty, or the two do not belong
        together.
    """
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for path in (index, data):
        if not path.is_file():
            raise ValueError(_missing(prefix, path, flag))
    size = index.stat().st_size
    with open(index, "rb") as file:
        header = file.read(_HEADER.size)
    if header[: len(_MAGIC)] != _MAGIC[: len(header)] or not header:
        raise ValueError(f"{flag} {prefix}: {index} is no Megatron index (wrong magic bytes); {_REBUILD}")
    if len(header) < _HEADER.size:
        raise ValueError(f"{flag} {prefix}: {index} is truncated (only {size} bytes); {_REBUILD}")
    _, version, code, sequences, boundaries = _HEADER.unpack(header)
    if version != 1 or code not in _DTYPES:
        raise ValueError(
            f"{flag} {prefix}: {index} has format version {version}, dtype code {code}; this reads version 1 "
            "with dtype "
            f"codes {min(_DTYPES)} to {max(_DTYPES)}; {_REBUILD}"
        )
    expected = _HEADER.size + sequences * 12 + boundaries * 8
    if size not in (expected, expected + sequences):  # the latter: a multimodal index with one mode byte each
        what = "truncated" if size < expected else "longer than it says"
        raise ValueError(f"{flag} {prefix}: {index} is {what} ({size} bytes, not {expected}); {_REBUILD}")
    if sequences == 0 or boundaries <= 1:
        raise ValueError(f"{flag} {prefix}: {index} holds no documents; {_REBUILD} from a file with text")
    if sequences > _MAX_SEQUENCES:
        raise ValueError(
            f"{flag} {prefix}: {sequences} documents, more than the {_MAX_SEQUENCES} that a sample index can "
            "address; "
            "split the corpus into several prefixes and give them all to " + flag
        )
    tokens = _check_arrays(prefix, flag, np.dtype(_DTYPES[code]), sequences, boundaries)
    return IndexedFiles(
        prefix,
        np.dtype(_DTYPES[code]),
        sequences,
        boundaries - 1,
        tokens,
        _fingerprint(index, data.stat().st_size),
    )


def _check_arrays(prefix: str, flag: str, dtype: np.dtype, sequences: int, boundaries: int) -> int:
    index = f"{prefix}.idx"
    raw = np.memmap(index, mode="r", dtype=np.uint8)
    offset = _HEADER.size
    lengths = np.frombuffer(raw, np.int32, sequences, offset)
    pointers = np.frombuffer(raw, np.int64, sequences, offset + 4 * sequences)
    documents = np.frombuffer(raw, np.int64, boundaries, offset + 12 * sequences)
    tokens = int(lengths.sum(dtype=np.int64))
    if int(lengths.min()) < 0:
        raise ValueError(f"{flag} {prefix}: {index} holds negative lengths, it is corrupt; {_REBUILD}")
    if documents[0] != 0 or documents[-1] != sequences or (np.diff(documents) < 0).any():
        raise ValueError(
            f"{flag} {prefix}: the document boundaries in {index} are broken (a merge that did not offset "
            f"them?); {_REBUILD}"
        )
    last = int(pointers[-1]) + int(lengths[-1]) * dtype.itemsize
    if pointers[0] != 0 or last != tokens * dtype.itemsize:
        raise ValueError(
            f"{flag} {prefix}: the pointers in {index} do not match its lengths (32-bit overflow in the "
            f"writer?); {_REBUILD}"
        )
    size = os.path.getsize(f"{prefix}.bin")
    if size != tokens * dtype.itemsize:
        what = "truncated" if size < tokens * dtype.itemsize else "longer than its index says"
        raise ValueError(
            f"{flag} {prefix}: {prefix}.bin is {what} ({size} bytes, not {tokens * dtype.itemsize}); "
            f"{_REBUILD}"
        )
    if tokens == 0:
        raise ValueError(f"{flag} {prefix}: {prefix}.bin holds no tokens; {_REBUILD} from a file with text")
    return tokens


def _missing(prefix: str, path: Path, flag: str) -> str:
    stem = Path(prefix)
    if stem.suffix in (".bin", ".idx") and stem.is_file():
        return f"{flag} {prefix}: pass the prefix without {stem.suffix}: {stem.with_suffix('')}"
    near = sorted(stem.parent.glob(stem.name + "*_document.idx")) if stem.parent.is_dir() else []
    hint = (
        f"did you mean {near[0].with_suffix('')}?" if near else "pass the prefix that preprocess_data printed"
    )
    return f"{flag} {prefix}: {path} does not exist; {hint}"


def _fingerprint(index: Path, data_bytes: int, ends: int = 1 << 20) -> str:
    size = index.stat().st_size
    state = hashlib.sha256(f"{size} {data_bytes}".encode())
    with open(index, "rb") as file:
        state.update(file.read(ends))
        file.seek(max(size - ends, 0))
        state.update(file.read(ends))
    return state.hexdigest()[:16]


def check_vocabulary(files: IndexedFiles, vocab_size: int, flag: str = "--data-path") -> None:
    """Compare token ids with the vocabulary: all of a small corpus, 64 evenly spread blocks of a large one.

    Samples are checked again, each, when they are read.

    Raises:
        ValueError: an id outside [0, vocab_size).
    """
    ids: np.ndarray = np.memmap(f"{files.prefix}.bin", mode="r", dtype=files.dtype)
    if len(ids) <= _SCAN_TOKENS:
        blocks = [ids]
    else:
        length = _SCAN_TOKENS // _SCAN_BLOCKS
        starts = np.linspace(0, len(ids) - length, _SCAN_BLOCKS, dtype=np.int64)
        blocks = [ids[start : start + length] for start in starts]
    check_ids(
        min(int(b.min()) for b in blocks),
        max(int(b.max()) for b in blocks),
        vocab_size,
        f"{flag} {files.prefix}",
    )


def check_ids(lowest: int, highest: int, vocab_size: int, source: str) -> None:
    """Raise ValueError unless [lowest, highest] lies in [0, vocab_size)."""
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(
            f"{source} holds the token id {wrong}, but the vocabulary has {vocab_size} ids: pass the "
            "--tokenizer-type, "
            "--tokenizer-model and --vocab-size with which the data was made"
        )
