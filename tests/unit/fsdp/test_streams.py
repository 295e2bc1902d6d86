"""What a step would run on which stream: no races, only the ends exposed, no host waits. On CPU, one process.

The recorder (recorder.py) writes down a step under a fake process group of 4 ranks; stream_model.py judges the records.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from megatron.fsdp import FSDPConfig, FullyShardedDataParallel, ShardingStrategy, data_parallel_placement
from tests.unit.fsdp.models import Block, FusedLinear
from tests.unit.fsdp.recorder import Recorder, recording
from tests.unit.fsdp.stream_model import Allocate, Free, Wait, WaitHandle, Work, exposed, races
from tests.unit.fsdp.test_wrapper import STRATEGIES, make_mesh

HIDDEN = 16


@pytest.fixture(autouse=True)
def four_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


class Stack(nn.Module):
    """Blocks and nothing else, so that the first unit is the first block."""

    def __init__(self, recompute: bool = False, sizes: tuple[int, ...] = (32,) * 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(HIDDEN, size, FusedLinear) for size in sizes)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


def train_step(
    model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer, microbatches: int = 2
) -> None:
    model.zero_grad_buffer()
    for _ in range(microbatches - 1):
        with model.no_sync():
            model(torch.ones(2, HIDDEN, requires_grad=True)).sum().backward()
    model(torch.ones(2, HIDDEN, requires_grad=True)).sum().backward()
    model.finish_grad_sync()
    optimizer.step()


def record(strategy: str, microbatches: int = 2, steps: int = 1, **options: object) -> Recorder:
    """Records of some steps after one that settles the order."""
    recompute = bool(options.pop("recompute", False))
    outer = int(options.pop("outer", 1))  # type: ignore[call-overload]
    config = FSDPConfig(strategy=ShardingStrategy(strategy), **options)  # type: ignore[arg-type]
    model = FullyShardedDataParallel(
        Stack(recompute), config, data_parallel_placement(make_mesh(4, outer)), (Block,)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    train_step(model, optimizer, microbatches)
    with recording(model.engine) as recorder:
        for _ in range(steps):
            train_step(model, optimizer, microbatches)
    return recorder


ONLY_Z3 = ("pool of two", "recompute", "two ahead")
OPTIONS: dict[str, dict] = {
    "plain": {},
    "two ahead": {"prefetch": 2, "max_reductions": 1},
    "pool of two": {"buffer_pool": 2},
    "recompute": {"recompute": True},
    "hybrid": {"outer": 2},
    "deferred": {"defer_communication": True},
    "narrow wire": {"grad_comm_dtype": torch.bfloat16},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_no_races(name: str) -> None:
    """Every use of a buffer on one stream is ordered after what another did to it, reuse of memory included (G25)."""
    for strategy in (
        STRATEGIES if name == "plain" else STRATEGIES[-1:] if name in ONLY_Z3 else STRATEGIES[-2:]
    ):
        recorder = record(strategy, **OPTIONS[name])
        assert len({work.stream for work in recorder.records if isinstance(work, Work)}) >= 3, (
            "nothing overlaps"
        )
        assert races(recorder.records) == [], strategy


RULES = {  # waits that a record without the rule lacks: (waiter, waited)
    "gathers wait for the optimizer and for what used released memory": ("gather", "compute"),
    "reductions wait for the weight gradients": ("reduce", "compute"),
    "compute waits for reductions": ("compute", "reduce"),
}


@pytest.mark.parametrize("name", ["plain", "pool of two"])
def test_each_rule_is_needed(name: str) -> None:
    """The sanitizer finds what happens without one of the rules of streams.py, pool(2) included."""
    records = record("optim_grads_params", steps=2, **OPTIONS[name]).records
    for rule, (waiter, waited) in RULES.items():
        assert races([each for each in records if each != Wait(waiter, waited)]), rule
    assert races([each for each in records if not isinstance(each, WaitHandle)]), "collectives are waited for"


PLANTED = {
    "read before the write of another stream": [Work("a", "w", writes=frozenset({1})), Work("b", "r", frozenset({1}))],
    "write beside a read": [
        Allocate("a", 1), Work("a", "w", writes=frozenset({1})), Wait("b", "a"), Work("b", "r", frozenset({1})),
        Work("a", "w2", writes=frozenset({1})),
    ],
    "memory reused too early": [
        Allocate("a", 1), Work("a", "w", writes=frozenset({1})), Wait("b", "a"), Work("b", "r", frozenset({1})),
        Free(1), Allocate("a", 2),
    ],
    "a handle waited for by the wrong stream": [
        Work("n", "gather", writes=frozenset({1}), handle=7), WaitHandle("b", 7), Work("a", "r", frozenset({1})),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_planted_races_are_found(name: str) -> None:
    """Each is one race; the same with its streams made one has none."""
    records = PLANTED[name]
    assert len(races(records)) == 1
    one = [
        Work("a", each.name, each.reads, each.writes, each.handle) if isinstance(each, Work) else each
        for each in records
    ]
    assert races(one) == []


def cost(work: Work) -> float:
    """A block's forward costs 20, its backward 40, its gather 16, its reduction 32: all can hide but the ends.

    A block has two groups (row widths 16 and 32), each a launch of its own here.
    """
    if work.stream.startswith("communicator"):
        return 8.0 if "gather" in work.name else 16.0
    return 10.0 if work.name in ("mm", "addmm") else 0.0


def test_only_the_first_gather_and_the_last_reduction_are_exposed() -> None:
    """With ideal streams: two gaps in a step, one as long as a gather, one as long as a reduction."""
    recorder = record("optim_grads_params", microbatches=1, steps=1)
    gaps = exposed(recorder.records, cost)
    total = sum(
        cost(work) for work in recorder.records if isinstance(work, Work) and work.stream == "compute"
    )
    merged: list[tuple[float, float]] = []
    for time, length in gaps:
        if merged and sum(merged[-1]) == time:  # nothing ran in between
            merged[-1] = merged[-1][0], merged[-1][1] + length
        else:
            merged.append((time, length))
    assert merged == [(0.0, 16.0), (total + 16.0, 32.0)]


def test_no_host_waits() -> None:
    """A steady step under FSDP makes the host wait for the device nowhere."""
    for strategy in STRATEGIES:
        assert record(strategy).synchronisations == [], strategy


def test_the_recorder_sees_host_waits() -> None:
    """`.item()` and its kin are counted."""
    engine = FullyShardedDataParallel(
        Stack(), FSDPConfig(), data_parallel_placement(make_mesh(4, 1)), (Block,)
    ).engine
    with recording(engine) as recorder:
        torch.ones(3).sum().item()
        torch.ones(3).nonzero()
    assert recorder.synchronisations == ["_local_scalar_dense", "nonzero"]
