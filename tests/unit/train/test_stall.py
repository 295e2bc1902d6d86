"""What the reports of a hanging run say together: the rank and the collective that differ."""

from __future__ import annotations

from typing import Any

from megatron.train.stall import diagnose


def flight(
    number: int, operation: str = "all_reduce", size: int = 4, purpose: str = "", state: str = "ended"
) -> Any:
    return {
        "sequence": number,
        "operation": operation,
        "sizes": [[size]],
        "dtype": "float32",
        "purpose": purpose,
        "state": state,
        "seconds": 1.0,
    }


def lane(*flights: Any, name: str = "tp", ranks: tuple[int, ...] = (0, 1), ordered: bool = True) -> Any:
    pending = [item for item in flights if item["state"] != "ended"]
    ended = [item for item in flights if item["state"] == "ended"]
    return {
        "id": name,
        "name": name,
        "ranks": list(ranks),
        "ordered": ordered,
        "launched": max((item["sequence"] for item in flights), default=0),
        "last": ended[-1] if ended else None,
        "pending": pending,
        "recent": list(flights),
    }


def report(*lanes: Any, phase: str = "training") -> Any:
    return {"lanes": lanes, "phase": phase, "iteration": 7, "place": "step.py:1 in f (x)"}


def test_a_rank_that_did_not_come() -> None:
    """O08."""
    lines = diagnose(
        {
            0: report(lane(flight(1), flight(2, size=8, purpose="layers.3", state="waiting"))),
            1: report(lane(flight(1)), phase="saving"),
        },
        2,
    )
    assert lines[0] == (
        "rank 0 waits for all_reduce #2 of group tp (ranks 0, 1), [8] float32 for layers.3: rank 1 has not launched it "
        "(it launched 1); it is in saving, iteration 7, at step.py:1 in f (x)"
    )
    assert lines[1].startswith("rank 1 waits for no collective")


def test_ranks_that_launched_different_things() -> None:
    """The first difference counts, also where later ones wait."""
    lines = diagnose(
        {
            0: report(lane(flight(1), flight(2, purpose="a"), flight(3, purpose="b", state="waiting"))),
            1: report(lane(flight(1), flight(2, purpose="b"), flight(3, size=9, state="waiting"))),
        },
        2,
    )
    assert len(lines) == 1
    assert "ranks differ: rank 0 launched all_reduce #2" in lines[0]
    assert "for a, but rank 1 launched all_reduce #2" in lines[0]


def test_sizes_that_differ() -> None:
    lines = diagnose({r: report(lane(flight(1, size=4 + r, state="waiting"))) for r in range(2)}, 2)
    assert "[4] float32, but rank 1" in lines[0] and "[5] float32" in lines[0]


def test_two_groups_that_wait_for_each_other() -> None:
    """A host wait that crosses two groups: each rank waits in a group that the other has not come to."""
    tensor, data = lane(flight(1, state="waiting"), name="tp"), lane(flight(4, state="waiting"), name="dp")
    lines = diagnose({0: report(tensor, lane(flight(3), name="dp")), 1: report(lane(name="tp"), data)}, 2)
    assert len(lines) == 2
    assert "#1 of group tp" in lines[0] and "rank 1 has not launched it" in lines[0]
    assert "#4 of group dp" in lines[1] and "rank 0 has not launched it" in lines[1]


def test_no_collective_at_all() -> None:
    lines = diagnose({0: report(lane(flight(1))), 1: report()}, 2)
    assert lines[0].startswith("no collective is pending on any rank")
    assert [line[:6] for line in lines[1:]] == ["rank 0", "rank 1"]


def test_missing_ranks_and_messages() -> None:
    waiting = flight(5, "messages", purpose="from rank 2", state="waiting")
    lines = diagnose({0: report(lane(waiting, name="pp", ranks=(0, 2), ordered=False))}, 3)
    assert lines[0] == "ranks 1, 2 did not report: stopped, or gone"
    assert lines[1].startswith("rank 0 waits for messages #5 of group pp (ranks 0, 2)")


def test_all_have_come() -> None:
    lines = diagnose({r: report(lane(flight(1, state="on the device"))) for r in range(2)}, 2)
    assert lines == [
        "ranks 0, 1 wait for all_reduce #1 of group tp (ranks 0, 1), [4] float32: all its ranks have launched it, so "
        "the network or a device is stuck"
    ]
