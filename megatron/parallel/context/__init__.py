"""Context parallelism: sequences split over ranks, and attention over the split."""

from megatron.parallel.context.attention import (
    KINDS,
    ContextParallelShape,
    check_context_parallel,
    context_parallel_attention,
)
from megatron.parallel.context.balance import split, split_batch, unsplit, zigzag_indices
from megatron.parallel.context.documents import Documents
from megatron.parallel.context.roll import roll_left

__all__ = [
    "KINDS",
    "ContextParallelShape",
    "Documents",
    "check_context_parallel",
    "context_parallel_attention",
    "roll_left",
    "split",
    "split_batch",
    "unsplit",
    "zigzag_indices",
]
