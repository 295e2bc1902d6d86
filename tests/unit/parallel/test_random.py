"""Random streams per axis, and recompute."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megatron.parallel.mesh import ParallelMesh, ParallelSizes
from megatron.parallel.random import DEFAULT, EXPERT, TENSOR, RngStreams, checkpoint, stream_seed

SIZES = ParallelSizes(tensor=2, pipeline=2, context=2, data=2, expert=2)


def test_streams_differ_exactly_where_they_should() -> None:
    """Default: alike over tp, different over dp, cp, pp. Tensor and expert streams: different everywhere."""
    meshes = [ParallelMesh(SIZES, rank=rank) for rank in range(SIZES.world)]
    default = {m.global_rank: stream_seed(1, DEFAULT, m) for m in meshes}
    assert all(default[rank] == default[rank ^ 1] for rank in default)
    assert len(set(default.values())) == SIZES.world // 2
    for name in (TENSOR, EXPERT):
        assert len({stream_seed(1, name, m) for m in meshes}) == SIZES.world
    assert stream_seed(1, DEFAULT, meshes[0]) != stream_seed(2, DEFAULT, meshes[0])


def test_fork_leaves_the_default_stream_alone_and_goes_on() -> None:
    streams = RngStreams.for_mesh(7, ParallelMesh.single())
    before = torch.get_rng_state()
    with streams.fork():
        first = torch.rand(4)
    assert torch.equal(torch.get_rng_state(), before)
    with streams.fork():
        second = torch.rand(4)
    again = RngStreams.for_mesh(7, ParallelMesh.single())
    with again.fork():
        assert torch.equal(torch.rand(8), torch.cat([first, second]))
    with again.fork(EXPERT):
        assert not torch.equal(torch.rand(4), first)


def test_saved_state_continues_bit_for_bit() -> None:
    """K01: every stream is saved and restored."""
    streams = RngStreams.for_mesh(7, ParallelMesh.single())
    with streams.fork():
        torch.rand(3)
    state = streams.state()

    def draw(s: RngStreams) -> Tensor:
        with s.fork():
            a = torch.rand(3)
        with s.fork(EXPERT):
            return torch.cat([a, torch.rand(3)])

    expected = draw(streams)
    other = RngStreams.for_mesh(8, ParallelMesh.single())
    other.load_state(state)
    assert torch.equal(draw(other), expected)
    with pytest.raises(ValueError, match="do not match"):
        RngStreams().load_state(state)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recompute_sees_the_same_random_numbers(reentrant: bool) -> None:
    """Dropout in two streams: gradients and what comes after equal a run without recompute."""

    def function(streams: RngStreams, x: Tensor) -> Tensor:
        with streams.fork():
            x = F.dropout(x, 0.5)
        return F.dropout(x.sin(), 0.5)

    results = []
    for recompute in (False, True):
        streams = RngStreams.for_mesh(3, ParallelMesh.single())
        x = torch.ones(64, requires_grad=True)
        y = x
        for _ in range(3):
            if recompute:
                y = checkpoint(partial(function, streams), y, streams=streams, use_reentrant=reentrant)
            else:
                y = function(streams, y)
        y.sum().backward()
        with streams.fork():
            after = torch.rand(4)
        results.append((y.detach(), x.grad, after, torch.rand(4)))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_failed_recompute_restores_the_streams() -> None:
    streams = RngStreams.for_mesh(3, ParallelMesh.single())
    calls = []

    def function(x: Tensor) -> Tensor:
        calls.append(1)
        with streams.fork():
            torch.rand(1)
        if len(calls) > 1:
            raise RuntimeError("on purpose")
        return x * x

    y = checkpoint(function, torch.ones(2, requires_grad=True), streams=streams)
    state = streams.state()
    with pytest.raises(RuntimeError, match="on purpose"):
        y.sum().backward()
    assert all(torch.equal(state[name], value) for name, value in streams.state().items())


def test_unknown_and_doubled_streams_are_named() -> None:
    streams = RngStreams()
    streams.add("a", 1)
    with pytest.raises(ValueError, match="'a' exists"):
        streams.add("a", 1)
    with pytest.raises(ValueError, match=r"unknown random stream 'b'; there are a"), streams.fork("b"):
        pass
