"""Peak live bytes of a rank under context parallelism, by counting the storages that tensors hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.parallel.context.attention import context_parallel_attention
from megatron.parallel.context.balance import split
from tests.pool import run_ranks

SEQ, BATCH, HEADS, GROUPS, DIM, LAYERS = 512, 1, 4, 2, 16, 4


class LiveBytes(TorchDispatchMode):
    """Counts bytes of the storages that operators see, while they live; not what kernels use inside."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # Inputs too: memory of autograd.Function arguments may come from before.
        for leaf in tree_leaves((args, result)):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._storages = {key: entry for key, entry in self._storages.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._storages.values()))
        return result


def peak_worker(rank: int, world_size: int, kind: str, layers: int) -> int:
    """Return peak live bytes of forward and backward of a residual stack of attention layers."""
    generator = torch.Generator().manual_seed(0)
    # One weight per layer, so that there is something to differentiate; its bytes do not depend on cp.
    scales = [torch.ones(HEADS, DIM, requires_grad=True) for _ in range(layers)]
    whole = torch.randn(SEQ, BATCH, HEADS, DIM, generator=generator)
    local = split(whole, 0, world_size, rank).clone()
    with LiveBytes() as live:
        x = local
        for scale in scales:
            q = x * scale
            kv = q[:, :, :GROUPS]
            x = x + context_parallel_attention(q, kv, kv * 0.5, group=dist.group.WORLD, kind=kind)
        x.square().mean().backward()
    assert all(bool(scale.grad.isfinite().all()) for scale in scales)
    return live.peak


def peaks(kind: str, layers: int) -> dict[int, int]:
    return {cp: max(run_ranks(peak_worker, cp, kind, layers)) for cp in (1, 2, 4)}


# docs/concepts/context_parallel.md, "Memory": per cent of the peak of one rank, at cp 2 and 4
TABLE = {"p2p": (56, 29), "a2a": (60, 37), "all_gather": (60, 37)}


@pytest.mark.parametrize("kind", TABLE)
def test_peak_activation_memory_falls_with_cp(kind: str) -> None:
    """Long context: what a rank keeps is its share of the sequence, plus the messages of one layer."""
    peak = peaks(kind, LAYERS)
    share = SEQ * BATCH * HEADS * DIM * 4
    assert peak[1] > LAYERS * 3 * share, "the count misses what layers keep"
    for ranks, percent in zip((2, 4), TABLE[kind], strict=True):
        assert 100 * peak[ranks] / peak[1] == pytest.approx(percent, abs=1), peak


def test_the_ring_holds_less_than_an_all_gather() -> None:
    """One layer, where buffers weigh most: the ring has two messages in flight, an all-gather all of them."""
    ring, gathered = (max(run_ranks(peak_worker, 4, kind, 1)) for kind in ("p2p", "all_gather"))
    assert ring < gathered, (ring, gathered)


def test_nothing_of_size_sequence_squared_is_ever_held() -> None:
    quadratic = (SEQ // 2) ** 2 * HEADS * BATCH * 4
    assert peaks("p2p", 1)[2] < quadratic


def test_the_count_sees_what_lives_and_forgets_what_died() -> None:
    with LiveBytes() as live:
        kept = torch.zeros(1000, dtype=torch.uint8)
        for _ in range(3):
            scratch = kept + 1
            del scratch
        assert live.peak == 2000
        both = [kept + 1, kept + 2]
        assert live.peak == 3000
        del both
