"""Every dispatcher equals the naive loop over tokens: values, gradients of tokens, weights and experts."""

from __future__ import annotations

import pytest
import torch

from megatron.parallel import collectives
from megatron.parallel.expert import AllGatherDispatcher, AllToAllDispatcher, ExpertGrid, Routing, dispatch
from megatron.parallel.expert import permute as p
from megatron.parallel.expert.flex import FlexDispatcher, flex_buffer
from megatron.parallel.mesh import ParallelMesh, ParallelSizes
from tests.pool import run_ranks
from tests.unit.parallel.expert.fake_flex import fake_flex_buffer

EXPERTS, TOPK, HIDDEN, INNER = 8, 2, 4, 8
# how the tokens choose: freely; all one expert (E08); none the experts of rank 1; more ranks than tokens
PATTERNS = {"free": 6, "one": 6, "idle_rank": 5, "few_tokens": 1}


def routing_of(pattern: str, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    tokens = PATTERNS[pattern]
    scores = torch.rand(tokens, EXPERTS, generator=generator)
    if pattern == "one":
        scores[:, 0], scores[:, 5] = 3.0, 2.0
    if pattern == "idle_rank":
        scores[:, EXPERTS // 2 :] = 0.0
    best = scores.topk(TOPK, dim=-1)
    return best.indices, best.values


def expert_weights() -> torch.Tensor:
    """[experts, inner, hidden], seeded; an expert is x -> x W^T W, cut over etp by rows of W."""
    return torch.randn(EXPERTS, INNER, HIDDEN, generator=torch.Generator().manual_seed(9))


def tokens_of(pattern: str, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(PATTERNS[pattern], HIDDEN, generator=generator)


def run_rank(rank, world_size, kind, etp, patterns):
    mesh = ParallelMesh(ParallelSizes(data=world_size, expert=world_size // etp, expert_tensor=etp))
    grid = ExpertGrid.of_mesh(EXPERTS, mesh)
    results = {}
    for pattern in patterns:
        results[pattern] = run_dispatcher(kind, grid, pattern, rank)
    return results


def run_dispatcher(kind, grid, pattern, rank):
    dispatcher = {
        "allgather": AllGatherDispatcher,
        "alltoall": AllToAllDispatcher,
        "padded": AllToAllDispatcher,
        "deepep": lambda grid: FlexDispatcher(grid, fake_flex_buffer("deepep", grid)),
        "hybridep": lambda grid: FlexDispatcher(grid, fake_flex_buffer("hybridep", grid)),
    }[kind](grid)
    experts, weights = routing_of(pattern, rank)
    weights.requires_grad_()
    tokens = tokens_of(pattern, rank).requires_grad_()
    part = slice(grid.etp_rank * INNER // grid.etp_size, (grid.etp_rank + 1) * INNER // grid.etp_size)
    mine = expert_weights()[grid.experts_of(grid.ep_rank), part].clone().requires_grad_()
    capacity = PATTERNS[pattern] * TOPK if kind == "padded" else None
    there = dispatcher.dispatch(tokens, Routing(experts, weights, EXPERTS, capacity))
    out = torch.cat([x @ w.t() @ w for x, w in zip(there.rows.split(there.splits), mine, strict=True)])
    result = there.combine(out)
    result.square().sum().backward()
    return result.detach(), tokens.grad, weights.grad, mine.grad, (grid.experts_of(grid.ep_rank), part)


def expected(pattern, world):
    """One process: the tokens of all ranks, one after the other."""
    routings = [routing_of(pattern, rank) for rank in range(world)]
    weights = torch.cat([item[1] for item in routings]).requires_grad_()
    tokens = torch.cat([tokens_of(pattern, rank) for rank in range(world)]).requires_grad_()
    experts = expert_weights().requires_grad_()
    routing = Routing(torch.cat([item[0] for item in routings]), weights, EXPERTS)
    out = p.naive_experts(tokens, routing, lambda e, x: x @ experts[e].t() @ experts[e])
    out.square().sum().backward()
    return out.detach(), tokens.grad, weights.grad, experts.grad


KINDS = [("allgather", 2, 1), ("alltoall", 2, 1), ("padded", 2, 1), ("deepep", 2, 1), ("alltoall", 2, 2)]
KINDS += [("allgather", 4, 2), ("alltoall", 4, 2), ("alltoall", 4, 1), ("deepep", 4, 1), ("padded", 4, 2)]
KINDS += [("hybridep", 2, 1), ("hybridep", 4, 1)]


@pytest.mark.parametrize(("kind", "world", "etp"), KINDS)
def test_equals_the_loop(kind, world, etp):
    """E08, E12: all tokens to one expert, a rank without tokens, more ranks than tokens; idle experts get zeros."""
    results = run_ranks(run_rank, world, kind, etp, tuple(PATTERNS), timeout=90)
    for pattern, count in PATTERNS.items():
        out, tokens, weights, experts = expected(pattern, world)
        for rank in range(world):
            own = slice(rank * count, (rank + 1) * count)
            got = results[rank][pattern]
            for value, reference in zip(got[:3], (out, tokens, weights), strict=True):
                assert torch.allclose(value, reference[own], rtol=1e-5, atol=1e-5), pattern
            which, part = got[4]
            assert torch.allclose(got[3], experts[which, part], rtol=1e-5, atol=1e-4), pattern
    for result in results:
        (which, _), gradient = result["idle_rank"][4], result["idle_rank"][3]
        assert gradient is not None and not gradient[max(0, EXPERTS // 2 - which.start) :].any()


def run_count(rank, world_size):
    """Gathers of counts of one dropless and of one padded call."""
    mesh = ParallelMesh(ParallelSizes(data=world_size, expert=world_size))
    grid = ExpertGrid.of_mesh(EXPERTS, mesh)
    original, gathered = dispatch.launch_all_gather, []
    dispatch.launch_all_gather = lambda *args: gathered.append(1) or original(*args)
    try:
        counts = []
        for capacity in (None, 4):
            experts, weights = routing_of("free", rank)
            AllToAllDispatcher(grid).dispatch(
                tokens_of("free", rank), Routing(experts, weights, EXPERTS, capacity)
            )
            counts.append(len(gathered))
    finally:
        dispatch.launch_all_gather = original
    return counts


def test_counts_travel_only_without_capacity():
    assert run_ranks(run_count, 2) == [[1, 1], [1, 1]]


def test_flex_libraries_are_asked_for_by_name():
    grid = ExpertGrid(EXPERTS, ep=object(), ep_size=2)
    for backend, name in (("deepep", "Buffer"), ("hybridep", "HybridEPBuffer")):
        with pytest.raises(ValueError, match=f"--moe-flex-dispatcher-backend {backend} needs .* {name}"):
            flex_buffer(backend, grid)
    with pytest.raises(ValueError, match="ncclep is not there: use deepep or hybridep"):
        flex_buffer("ncclep", grid)
    with pytest.raises(ValueError, match="--expert-model-parallel-size 2 or more"):
        flex_buffer("deepep", ExpertGrid(EXPERTS))


def run_events(rank, world_size):
    """What happens in forward and in backward of one call, in order."""
    mesh = ParallelMesh(ParallelSizes(data=world_size, expert=world_size))
    grid = ExpertGrid.of_mesh(EXPERTS, mesh)
    dispatcher, events = AllToAllDispatcher(grid), []
    launch, wait = collectives.launch_all_to_all, collectives.Pending.wait
    experts, weights = routing_of("free", rank)
    tokens = tokens_of("free", rank).requires_grad_()
    dispatcher.switch = lambda: events.append("switch")
    shared = []

    def meanwhile():
        shared.append(tokens * 2)
        shared[0].register_hook(lambda grad: events.append("meanwhile"))
        events.append("meanwhile")

    collectives.launch_all_to_all = lambda *args: events.append("launch") or launch(*args)
    collectives.Pending.wait = lambda self: events.append("wait") or wait(self)
    try:
        there = dispatcher.dispatch(tokens, Routing(experts, weights, EXPERTS), meanwhile)
        out = there.combine(there.rows * 3)
        events.append("backward")
        (out + shared[0]).sum().backward()
    finally:
        collectives.launch_all_to_all, collectives.Pending.wait = launch, wait
    return events


def test_what_is_done_meanwhile_is_done_meanwhile():
    """Between launch and wait of the tokens' way, in forward and in backward; so is the switch."""
    events = run_ranks(run_events, 2)[0]
    counts, forward = events[0], events[1 : events.index("backward")]
    assert counts == "wait"
    assert forward == ["launch", "meanwhile", "switch", "wait", "launch", "switch", "wait"]
    backward = events[events.index("backward") + 1 :]
    assert [event for event in backward if event != "meanwhile"] == ["launch", "switch", "wait"] * 2
    assert backward[backward.index("meanwhile") - 1] == "launch" or backward[0] == "meanwhile"


def test_experts_must_divide():
    mesh = ParallelMesh(ParallelSizes(data=3, expert=3), rank=0)
    with pytest.raises(
        ValueError, match="--num-experts 8 is not a multiple of --expert-model-parallel-size 3"
    ):
        ExpertGrid.of_mesh(8, mesh)


@pytest.mark.parametrize(("capacity", "waits"), [(None, 1), (6, 0)])
def test_host_waits(monkeypatch, capacity, waits):
    """One for a dropless call, none with a capacity."""
    counted = []
    for name in ("tolist", "item", "__bool__", "nonzero", "cpu", "__int__"):
        original = getattr(torch.Tensor, name)

        def call(self, *args, original=original, name=name):
            counted.append(name)
            return original(self, *args)

        monkeypatch.setattr(torch.Tensor, name, call)
    experts, weights = routing_of("free", 0)
    tokens = tokens_of("free", 0).requires_grad_()
    there = AllToAllDispatcher(ExpertGrid(EXPERTS)).dispatch(
        tokens, Routing(experts, weights, EXPERTS, capacity)
    )
    there.combine(there.rows).sum().backward()
    assert len(counted) == waits, counted
