"""A forward and a backward that take turns, so that each computes while the other's messages travel.

Note "Turns". Both run in threads of their own, but never at once: `switch()` hands over to the other and returns when
that one hands back or is over. So the order of everything, collectives included, follows from where `switch` is
called, and is the same on all ranks if those places are. What each of the two computes does not change by a bit.

Note "Whose turn". The forward runs in the thread that calls `run`; whoever else calls `switch` meanwhile (the thread
made for the backward, or autograd's own on a GPU) belongs to the backward. On a GPU both launch on the same stream:
what overlaps is the other's kernels with the collective that was launched before the switch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum
from typing import TypeVar

import torch

Result = TypeVar("Result")


class Side(Enum):
    """Who runs."""

    FORWARD = "forward"
    BACKWARD = "backward"

    @property
    def other(self) -> Side:
        """The other one."""
        return Side.BACKWARD if self is Side.FORWARD else Side.FORWARD


class _Turns:
    """Whose turn it is, of one pair."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._turn = Side.FORWARD
        self._over: set[Side] = set()
        self._forward_thread = threading.get_ident()
        self.error: BaseException | None = None

    def side(self) -> Side:
        """Of the calling thread (note "Whose turn")."""
        return Side.FORWARD if threading.get_ident() == self._forward_thread else Side.BACKWARD

    def hand_over(self, side: Side) -> bool:
        """Let the other go on until it hands back; False where it is over."""
        with self._changed:
            if side.other in self._over:
                return False
            self._turn = side.other
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._turn is side)
        return True

    def wait_for(self, side: Side) -> None:
        """Block until it is this side's turn."""
        with self._changed:
            self._changed.wait_for(lambda: self._turn is side)

    def end(self, side: Side) -> None:
        """This side is over: the other keeps the turn."""
        with self._changed:
            self._over.add(side)
            self._turn = side.other
            self._changed.notify_all()


class Interleaver:
    """Runs pairs (notes at the top of this module). `switches`: hand-overs of the last pair, by who gave."""

    def __init__(self) -> None:
        self._turns: _Turns | None = None
        self.switches: list[Side] = []

    def run(self, forward: Callable[[], Result], backward: Callable[[], None]) -> Result:
        """Run both, the forward first until it switches; returns the forward's result.

        Raises what either raised, the forward's first; the other one is finished before.
        """
        turns, self.switches = _Turns(), []
        stream = torch.cuda.current_stream() if torch.cuda.is_available() else None
        thread = threading.Thread(target=_run_backward, args=(turns, backward, stream), daemon=True)
        self._turns = turns
        thread.start()
        try:
            result = forward()
        finally:
            turns.end(Side.FORWARD)
            thread.join()
            self._turns = None
        if turns.error is not None:
            raise turns.error
        return result

    def switch(self) -> None:
        """Hand over to the other of the pair; nothing outside of `run`."""
        turns = self._turns
        if turns is None:
            return
        side = turns.side()
        self.switches.append(side)
        turns.hand_over(side)


def _run_backward(turns: _Turns, backward: Callable[[], None], stream: torch.cuda.Stream | None) -> None:
    turns.wait_for(Side.BACKWARD)
    try:
        if stream is None:
            backward()
        else:  # device and stream are a thread's own
            with torch.cuda.device(stream.device), torch.cuda.stream(stream):
                backward()
    except BaseException as error:
        turns.error = error
    finally:
        turns.end(Side.BACKWARD)
