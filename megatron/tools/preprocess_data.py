"""Tokenizes text into the .bin/.idx pairs that training reads.

    python -m megatron.tools.preprocess_data --input corpus.jsonl.gz --output-prefix data/corpus \
        --tokenizer-type SentencePieceTokenizer --tokenizer-model data/shakespeare_spm_2k.model --append-eod
        --workers 8

writes data/corpus_text_document.bin and .idx; --data-path takes data/corpus_text_document. Documents keep the
order of the input whatever the number of workers and partitions, so the output is the same byte for byte.
Files appear by rename when they are complete.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain, islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from megatron.tools.encode import EncodedBatch, encode_batch, start_worker
from megatron.tools.indexed_output import IndexedOutput, merge
from megatron.tools.progress import Progress
from megatron.tools.text_input import Piece, input_files, read_pieces
from megatron.train.tokenizers import TOKENIZER_TYPES, build_tokenizer

_BATCH_BYTES = 1 << 18
_BATCH_DOCUMENTS = 256
_REFUSED = {
    "--split-sentences": "documents are kept whole, as GPT needs them (sentences are for BERT)",
    "--keep-newlines": "newlines are always kept",
    "--lang": "it belongs to --split-sentences, which is not built here",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status: 0, or 2 after one line on what is wrong."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        run(args)
    except ValueError as error:
        print(f"preprocess_data: {error}", file=sys.stderr)
        return 2
    except BrokenProcessPool:
        print(
            "preprocess_data: a worker process was killed, most likely for lack of memory: lower --workers, "
            "or split very "
            "long documents",
            file=sys.stderr,
        )
        return 1
    except OSError as error:
        print(f"preprocess_data: {error.filename or args.output_prefix}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("preprocess_data: interrupted, nothing was written", file=sys.stderr)
        return 130
    return 0


def run(args: argparse.Namespace) -> dict[str, str]:
    """Tokenize as ``args`` say and return the prefix written for each JSON key.

    Raises:
        ValueError: bad flags, tokenizer or input; names the flag or file and the fix.
    """
    for flag, why in _REFUSED.items():
        if getattr(args, flag[2:].replace("-", "_")):
            raise ValueError(f"{flag} is not built here: {why}; leave it out")
    if args.workers < 1 or args.partitions < 1:
        raise ValueError(f"--workers {args.workers}, --partitions {args.partitions}: both must be at least 1")
    started = time.monotonic()
    prefixes = {key: f"{args.output_prefix}_{key}_document" for key in args.json_keys}
    tokenizer = build_tokenizer(args)
    job = _Job(args, tuple(input_files(args.input)), prefixes, tokenizer.vocab_size)
    counts = _tokenize(job) if args.partitions == 1 else _tokenize_parts(job)
    seconds = max(time.monotonic() - started, 1e-9)
    for key, (documents, tokens) in counts.items():
        speed = f"{tokens / seconds:.3g} tokens/s"
        print(f"{prefixes[key]}: {documents} documents, {tokens} tokens in {seconds:.1f} s ({speed})")
        print(f"train on it with --data-path {prefixes[key]}")
    return prefixes


@dataclass(frozen=True)
class _Job:
    """Documents [begin, end) of the input to tokenize into one pair per JSON key; end None: to the last."""

    args: argparse.Namespace
    files: tuple[Path, ...]
    prefixes: dict[str, str]
    vocab_size: int
    begin: int = 0
    end: int | None = None


def _tokenize(job: _Job) -> dict[str, tuple[int, int]]:
    """Do ``job``; return (documents, tokens) by key."""
    args = job.args
    with ExitStack() as stack:
        total = sum(path.stat().st_size for path in job.files)
        progress = stack.enter_context(Progress(total, args.log_interval, quiet=job.begin > 0))
        # The first batch is under way, so the workers are forked, before this process imports anything heavy.
        pool = ProcessPoolExecutor(
            args.workers,
            mp_context=_context(),
            initializer=start_worker,
            initargs=(args, tuple(args.json_keys)),
        )
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        pieces = islice(read_pieces(job.files, args.document_separator), job.begin, job.end)
        results = _in_order(pool, _batches(pieces), args.workers)
        first = next(results, None)
        dtype = token_dtype(job.vocab_size)
        outputs = {key: stack.enter_context(IndexedOutput(name, dtype)) for key, name in job.prefixes.items()}
        for batch in chain([first] if first else [], results):
            for document in batch.documents:
                for key, ids in document.items():
                    outputs[key].add(ids)
            progress.update(batch.position, len(batch.documents) + batch.empty, batch.tokens)
        counts = {key: (output.documents, output.tokens) for key, output in outputs.items()}
        if job.end is None:
            _require_text(args, counts)
        for output in outputs.values():
            output.commit()
        pool.shutdown()  # at leisure: an interpreter that ends beside a pool that closes may find its pipe gone
    return counts


def _tokenize_parts(job: _Job) -> dict[str, tuple[int, int]]:
    """Do ``job`` in contiguous parts, by processes that each read and write, and merge them in order."""
    args, count = job.args, job.args.partitions
    documents = sum(1 for _ in read_pieces(job.files, args.document_separator))
    if documents < count:
        raise ValueError(f"--partitions {count}: the input has only {documents} documents; lower it")
    args = argparse.Namespace(**{**vars(args), "workers": max(1, args.workers // count)})
    parts = [
        replace(
            job,
            args=args,
            prefixes={key: f"{prefix}.part{index}" for key, prefix in job.prefixes.items()},
            begin=documents * index // count,
            end=documents * (index + 1) // count,
        )
        for index in range(count)
    ]
    try:
        # Unlike those of multiprocessing.Pool, these processes may have workers of their own.
        with ProcessPoolExecutor(count, mp_context=_context()) as pool:
            done = list(pool.map(_tokenize, parts))
        counts = {
            key: (sum(part[key][0] for part in done), sum(part[key][1] for part in done)) for key in done[0]
        }
        _require_text(args, counts)
        for key, prefix in job.prefixes.items():
            merge([part.prefixes[key] for part, did in zip(parts, done, strict=True) if did[key][1]], prefix)
    finally:
        for part in parts:
            for prefix in part.prefixes.values():
                Path(f"{prefix}.bin").unlink(missing_ok=True)
                Path(f"{prefix}.idx").unlink(missing_ok=True)
    return counts


def _require_text(args: argparse.Namespace, counts: dict[str, tuple[int, int]]) -> None:
    for key, (_, tokens) in counts.items():
        if tokens == 0:
            raise ValueError(
                f"--input {' '.join(args.input)} holds no text under the key {key}: pass --json-keys"
            )


def _context() -> Any:
    return get_context("fork" if sys.platform == "linux" else "spawn")


def token_dtype(vocab_size: int) -> type[np.number]:
    """Return the type of ids on disk: two bytes where they fit with Megatron's margin, else four."""
    return np.uint16 if vocab_size < 65500 else np.int32


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Group documents so that handing one over costs little beside tokenizing it."""
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.raw)
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _in_order(
    pool: ProcessPoolExecutor, batches: Iterator[list[Piece]], workers: int
) -> Iterator[EncodedBatch]:
    """Encode batches in the pool, give them back in order, and hold only a few in memory."""
    waiting: deque[Future[EncodedBatch]] = deque()
    for batch in batches:
        waiting.append(pool.submit(encode_batch, batch))
        if len(waiting) >= 4 * workers:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="preprocess_data", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add: Callable[..., Any] = parser.add_argument
    add("--input", nargs="+", required=True, help=".jsonl or .txt files, gzipped or not, or glob patterns")
    add("--json-keys", nargs="+", default=["text"], help="keys to take the text from, one output each")
    add(
        "--document-separator",
        help="the line that ends a document in .txt files (default: a file is one document)",
    )
    add("--output-prefix", required=True, help="output is PREFIX_KEY_document.bin and .idx")
    add("--append-eod", action="store_true", help="end each document with the end-of-document id")
    add("--workers", type=int, default=1, help="tokenizing processes")
    add("--partitions", type=int, default=1, help="parts that are read and written at once, then merged")
    add("--keep-sequential-samples", action="store_true", help="accepted: documents always keep their order")
    add("--log-interval", type=int, default=1000, help="documents between lines of progress without terminal")
    add("--tokenizer-type", required=True, help=f"one of {', '.join(TOKENIZER_TYPES)}")
    add("--tokenizer-model", help="its file or folder")
    add("--vocab-file", help="vocab.json of GPT2BPETokenizer")
    add("--merge-file", help="merges.txt of GPT2BPETokenizer")
    add("--vocab-size", type=int, help="for NullTokenizer; cuts TikTokenizer's vocabulary")
    add("--tiktoken-pattern", help="v1 or v2")
    add("--tiktoken-num-special-tokens", type=int)
    add("--tiktoken-special-tokens", nargs="+")
    add("--null-tokenizer-eod-id", type=int)
    add("--null-tokenizer-pad-id", type=int)
    for flag in ("--split-sentences", "--keep-newlines"):
        add(flag, action="store_true", help=argparse.SUPPRESS)
    add("--lang", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
