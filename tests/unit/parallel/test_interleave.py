"""Turns of a forward and a backward: their order, who is alone when the other is over, and errors."""

from __future__ import annotations

import threading

import pytest
import torch

from megatron.parallel.interleave import Interleaver, Side


def pair(interleaver: Interleaver, forward_steps: int, backward_steps: int) -> list[str]:
    """The order in which the steps of both ran; each switches between its steps."""
    log: list[str] = []

    def steps(name: str, count: int) -> str:
        for index in range(count):
            if index:
                interleaver.switch()
            log.append(f"{name}{index}")
        return name

    assert interleaver.run(lambda: steps("f", forward_steps), lambda: steps("b", backward_steps)) == "f"
    return log


@pytest.mark.parametrize(
    ("forward", "backward", "expected"),
    [
        (3, 3, "f0 b0 f1 b1 f2 b2"),
        (2, 4, "f0 b0 f1 b1 b2 b3"),
        (4, 2, "f0 b0 f1 b1 f2 f3"),
        (1, 3, "f0 b0 b1 b2"),
    ],
)
def test_turns(forward: int, backward: int, expected: str) -> None:
    """One at a time, in an order that follows from the switches alone; the rest of the longer one alone."""
    interleaver = Interleaver()
    for _ in range(20):
        assert " ".join(pair(interleaver, forward, backward)) == expected
    assert interleaver.switches.count(Side.FORWARD) == forward - 1
    assert interleaver.switches.count(Side.BACKWARD) == backward - 1


def test_a_switch_alone_does_nothing() -> None:
    interleaver = Interleaver()
    interleaver.switch()
    assert not interleaver.switches


def test_autograd_switches_from_its_backward() -> None:
    """The backward's switches come from within autograd."""
    interleaver, log = Interleaver(), []

    class Step(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: torch.Tensor) -> torch.Tensor:
            log.append("forward")
            interleaver.switch()
            return x * 2

        @staticmethod
        def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
            log.append("backward")
            interleaver.switch()
            return grad * 2

    def forward() -> torch.Tensor:
        return Step.apply(Step.apply(leaf)).sum()

    leaf = torch.ones(3, requires_grad=True)
    first = forward()
    del log[:]
    second = interleaver.run(forward, first.backward)
    assert log == ["forward", "backward", "forward", "backward"]
    assert torch.equal(leaf.grad, torch.full((3,), 4.0))
    second.backward()
    assert torch.equal(leaf.grad, torch.full((3,), 8.0))


@pytest.mark.parametrize("which", ["forward", "backward", "both"])
def test_an_error_ends_the_pair_and_the_other_finishes(which: str) -> None:
    interleaver, log = Interleaver(), []

    def steps(name: str) -> None:
        interleaver.switch()
        if which in (name, "both"):
            raise ValueError(name)
        interleaver.switch()
        log.append(name)

    with pytest.raises(ValueError, match="backward" if which == "backward" else "forward"):
        interleaver.run(lambda: steps("forward"), lambda: steps("backward"))
    assert log == [name for name in ("forward", "backward") if which not in (name, "both")]
    assert threading.active_count() >= 1 and " ".join(pair(interleaver, 2, 2)) == "f0 b0 f1 b1"
