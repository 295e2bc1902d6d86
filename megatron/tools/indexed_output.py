"""Writes .bin/.idx pairs through megatron-core so that they appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from megatron.train.data.core_import import import_core_datasets


class IndexedOutput:
    """A pair under construction: hidden temporary files, renamed to ``prefix`` by ``commit``, removed
    otherwise.

    Use as a context manager.

    Args:
        prefix: path without .bin and .idx.
        dtype: of the token ids: numpy.uint16 or numpy.int32.

    Raises:
        ValueError: the folder cannot be written.
    """

    def __init__(self, prefix: str, dtype: type[np.number]) -> None:
        import_core_datasets()
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        self.prefix = prefix
        self.documents = 0
        self.tokens = 0
        self._final = Path(prefix)
        self._temporary = self._final.with_name(f".{self._final.name}.{os.getpid()}.tmp")
        try:
            self._final.parent.mkdir(parents=True, exist_ok=True)
            self._builder: Any = IndexedDatasetBuilder(f"{self._temporary}.bin", dtype=dtype)
        except OSError as error:
            raise ValueError(
                f"--output-prefix {prefix} cannot be written ({error.strerror}): pass another"
            ) from None

    def add(self, ids: np.ndarray) -> None:
        """Append one document."""
        self._builder.add_document(ids, [len(ids)])
        self.documents += 1
        self.tokens += len(ids)

    def add_files(self, prefix: str) -> None:
        """Append all documents of another pair, whose dtype must be the same."""
        self._builder.add_index(prefix)

    def commit(self) -> None:
        """Write the index and give both files their names, the index last: it is what readers look for."""
        self._builder.finalize(f"{self._temporary}.idx")
        Path(f"{self.prefix}.idx").unlink(missing_ok=True)  # never an old index beside new data
        for suffix in (".bin", ".idx"):
            with open(f"{self._temporary}{suffix}", "rb") as file:
                os.fsync(file.fileno())
            os.replace(f"{self._temporary}{suffix}", f"{self.prefix}{suffix}")

    def __enter__(self) -> IndexedOutput:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # a full disk, which is being reported already
            self._builder.data_file.close()
        for suffix in (".bin", ".idx"):
            Path(f"{self._temporary}{suffix}").unlink(missing_ok=True)


def merge(prefixes: Sequence[str], output_prefix: str) -> tuple[int, int]:
    """Append the pairs at ``prefixes``, in this order, into a new one; return its (documents, tokens).

    Raises:
        ValueError: a pair is missing or corrupt, their dtypes differ, or the output is one of them.
    """
    from megatron.train.data.files import check_indexed_files

    if not prefixes:
        raise ValueError("--input names no .bin/.idx pair: pass a folder with some, or their prefixes")
    found = [check_indexed_files(prefix, "--input") for prefix in prefixes]
    dtypes = {files.dtype for files in found}
    if len(dtypes) > 1:
        odd = next(files for files in found if files.dtype != found[0].dtype)
        raise ValueError(
            f"--input {odd.prefix} holds {odd.dtype} ids and {found[0].prefix} {found[0].dtype}: they were "
            "made with "
            "different tokenizers; tokenize them again with one"
        )
    if any(os.path.realpath(prefix) == os.path.realpath(output_prefix) for prefix in prefixes):
        raise ValueError(f"--output-prefix {output_prefix} is also an input: pass another")
    with IndexedOutput(output_prefix, found[0].dtype.type) as output:
        for prefix in prefixes:
            output.add_files(prefix)
        output.commit()
    return sum(files.documents for files in found), sum(files.tokens for files in found)
