"""Calls and bytes of each kind are what docs/concepts/context_parallel.md says; the ring overlaps them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.parallel import collectives
from megatron.parallel.context import ring
from megatron.parallel.context.attention import context_parallel_attention
from megatron.parallel.context.balance import split
from megatron.parallel.context.local import CpuFlashKernel
from tests.pool import run_ranks

SEQ, BATCH, HEADS, DIM = 32, 1, 4, 8
COLLECTIVES = (
    (dist, "batch_isend_irecv"),
    (dist, "all_to_all_single"),
    (collectives, "_all_gather_single"),  # torch's function, under the name that this version has
)


class Recorder:
    """Replaces the collectives of torch.distributed and notes the bytes that this rank sends to others."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, int]] = []
        for owner, name in COLLECTIVES:
            patch.setattr(owner, name, self._wrap(name, getattr(owner, name)))

    def _wrap(self, name: str, function: Any) -> Any:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            size = dist.get_world_size()
            if name == "batch_isend_irecv":
                sent = sum(op.tensor.nbytes for op in args[0] if op.op is dist.isend)
            elif name == "all_to_all_single":
                sent = args[1].nbytes * (size - 1) // size
            else:
                sent = args[1].nbytes * (size - 1)
            self.calls.append((name, sent))
            return function(*args, **kwargs)

        return recorded


def cost_worker(
    rank: int, world_size: int, kind: str, groups: int, dtype: torch.dtype
) -> list[list[tuple[str, int]]]:
    """Return the calls of the forward and of the backward."""
    heads = HEADS, groups, groups
    qkv = [
        split(torch.randn(SEQ, BATCH, h, DIM), 0, world_size, rank).to(dtype).requires_grad_() for h in heads
    ]
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(patch)
        out = context_parallel_attention(*qkv, group=dist.group.WORLD, kind=kind)
        forward = list(recorder.calls)
        out.sum().backward()
        return [forward, recorder.calls[len(forward) :]]


@pytest.mark.parametrize(("cp", "groups"), [(2, 4), (4, 4), (4, 2)])
def test_calls_and_bytes(cp: int, groups: int) -> None:
    """The formulas of the documentation in bf16: q and k bytes of a rank, values as wide as keys."""
    q = SEQ // cp * BATCH * HEADS * DIM * 2
    k = SEQ // cp * BATCH * groups * DIM * 2
    share = (cp - 1) / cp
    k_repeated = k * math.lcm(groups, cp) // groups
    wanted = {
        "p2p": ([2 * k] * (cp - 1), sorted([2 * k] * (cp - 1) + [4 * k] * cp)),
        "a2a": ([(q + 2 * k_repeated) * share, q * share],) * 2,
        # On gloo the reduce-scatter is an all-to-all and a local sum: as many bytes as NCCL's.
        "all_gather": ([2 * k * (cp - 1)], [2 * k * (cp - 1), 4 * k * (cp - 1)]),
    }
    for kind, (forward, backward) in wanted.items():
        for calls in run_ranks(cost_worker, cp, kind, groups, torch.bfloat16):
            assert [sent for _, sent in calls[0]] == forward, kind
            assert sorted(sent for _, sent in calls[1]) == sorted(backward), kind


class _LoggingKernel(CpuFlashKernel):
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def forward(self, *args: Any) -> Any:
        self.log.append("compute")
        return super().forward(*args)

    def backward(self, *args: Any) -> Any:
        self.log.append("compute")
        return super().backward(*args)


def overlap_worker(rank: int, world_size: int) -> list[list[str]]:
    """Return the order of starts, waits and computations of the forward and of the backward."""
    log: list[str] = []

    class LoggingHop(ring._Hop):
        def __init__(self, tensor: torch.Tensor, task: Any, tag: int) -> None:
            self.what = "keys" if tag == ring._KEYS_TAG else "gradients"
            log.append(f"start {self.what}")
            super().__init__(tensor, task, tag)

        def wait(self) -> torch.Tensor:
            log.append(f"wait {self.what}")
            return super().wait()

    qkv = [split(torch.randn(24, 1, 2, 4), 0, world_size, rank).requires_grad_() for _ in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "_Hop", LoggingHop)
        out = context_parallel_attention(*qkv, group=dist.group.WORLD, kernel=_LoggingKernel(log))
        forward = list(log)
        out.sum().backward()
    return [forward, log[len(forward) :]]


def test_messages_are_in_flight_while_the_ring_computes() -> None:
    step = ["start keys", "compute", "wait keys"]
    last = ["compute", "wait gradients", "start gradients", "wait gradients"]
    for forward, backward in run_ranks(overlap_worker, 3):
        assert forward == step * 2 + ["compute"]
        first = [*step, "start gradients"]
        second = ["start keys", "compute", "wait gradients", "wait keys", "start gradients"]
        assert backward == first + second + last
