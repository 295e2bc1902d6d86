"""Sequence parallelism: hidden states [s, b, h] cut along s over the tensor-parallel ranks, between their
layers.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv:2205.05198),
section 4.2. The layers' own gathers and reduce-scatters are in tensor.py; these are for what lies around
them.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.parallel.collectives import all_gather, gather, scatter


def check_sequence(length: int, size: int) -> None:
    """ValueError, naming the flags, where a sequence does not divide by the tensor-parallel size."""
    if length % size:
        raise ValueError(
            f"--sequence-parallel: a sequence of {length} tokens (--seq-length over context parallel size) "
            "does not "
            f"divide by --tensor-model-parallel-size {size}"
        )


def scatter_sequence(hidden: Tensor, group: ProcessGroup | None) -> Tensor:
    """Replicated [s, b, h] -> this rank's [s / size, b, h]."""
    if group is not None:
        check_sequence(hidden.shape[0], group.size())
    return scatter(hidden, group)


def gather_sequence(hidden: Tensor, group: ProcessGroup | None, tensor_parallel_use: bool) -> Tensor:
    """[s / size, b, h] -> [s, b, h].

    tensor_parallel_use: each rank does something else with the result (its heads, its columns), so that
        gradients are
    summed; else all do the same with it and each keeps its piece of the gradient.
    """
    return all_gather(hidden, group) if tensor_parallel_use else gather(hidden, group)
