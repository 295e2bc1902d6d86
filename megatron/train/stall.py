"""Why a run stands still, from what its ranks report. PURE: reports in, sentences out.

A report is what megatron/train/watchdog.py writes: rank, host, phase, iteration, seconds without progress, the place in
our code where the main thread is, and the lanes of megatron/parallel/flight.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Report = Mapping[str, Any]
_HELD = ("waiting", "on the device")


@dataclass(frozen=True)
class _Waiter:
    rank: int
    lane: Mapping[str, Any]
    flight: Mapping[str, Any]


def diagnose(reports: Mapping[int, Report], world_size: int) -> list[str]:
    """Sentences that name the ranks, and the collectives in which they differ.

    reports: by rank; a rank that did not report is missing.
    """
    missing = [rank for rank in range(world_size) if rank not in reports]
    lines = [f"{_ranks(missing)} did not report: stopped, or gone"] if missing else []
    waiters = [
        _Waiter(rank, lane, flight)
        for rank, report in sorted(reports.items())
        for lane in report["lanes"]
        for flight in lane["pending"]
        if flight["state"] in _HELD
    ]
    by_lane: dict[str, list[_Waiter]] = {}
    for waiter in waiters:
        by_lane.setdefault(waiter.lane["id"], []).append(waiter)
    for members in by_lane.values():
        explain = _collective if members[0].lane["ordered"] else _messages
        lines += explain(members, reports)
    if not waiters:
        lines.append("no collective is pending on any rank that reports; they wait on their own machines")
    idle = sorted(set(reports) - {waiter.rank for waiter in waiters})
    lines += [f"rank {rank} waits for no collective: {place(reports[rank])}" for rank in idle]
    return lines


def place(report: Report) -> str:
    """Where a rank is."""
    return f"it is in {report['phase']}, iteration {report['iteration']}, at {report['place']}"


def described(lane: Mapping[str, Any], flight: Mapping[str, Any]) -> str:
    """One operation in words."""
    sizes = ", ".join(str(list(size)) for size in flight["sizes"]) or "no tensors"
    purpose = f" for {flight['purpose']}" if flight["purpose"] else ""
    return (
        f"{flight['operation']} #{flight['sequence']} of group {lane['name']} ({_ranks(lane['ranks'])}), "
        f"{sizes} {flight['dtype']}{purpose}"
    )


def _messages(waiters: Sequence[_Waiter], reports: Mapping[int, Report]) -> list[str]:
    return [f"rank {w.rank} waits for {described(w.lane, w.flight)}" for w in waiters]


def _collective(waiters: Sequence[_Waiter], reports: Mapping[int, Report]) -> list[str]:
    first = min(waiters, key=lambda waiter: waiter.flight["sequence"])
    number, ranks = first.flight["sequence"], first.lane["ranks"]
    lanes = {rank: _lane(reports[rank], first.lane["id"]) for rank in ranks if rank in reports}
    lines = _difference(lanes)
    waiting = [waiter.rank for waiter in waiters if waiter.flight["sequence"] == number]
    absent = [rank for rank, lane in lanes.items() if (lane["launched"] if lane else 0) < number]
    silent = [rank for rank in ranks if rank not in reports]
    text = (
        f"{_ranks(waiting)} wait{'s' if len(waiting) == 1 else ''} for {described(first.lane, first.flight)}"
    )
    for rank in absent:
        lane = lanes[rank]
        launched = lane["launched"] if lane else 0
        lines.append(
            f"{text}: rank {rank} has not launched it (it launched {launched}); {place(reports[rank])}"
        )
    if silent:
        lines.append(f"{text}: {_ranks(silent)} did not report")
    if not lines:
        lines.append(f"{text}: all its ranks have launched it, so the network or a device is stuck")
    return lines


def _difference(lanes: Mapping[int, Mapping[str, Any] | None]) -> list[str]:
    """The first operation that is not the same on all ranks, of those that they still remember."""
    remembered: dict[int, dict[int, Mapping[str, Any]]] = {
        rank: {flight["sequence"]: flight for flight in lane["recent"]}
        for rank, lane in lanes.items()
        if lane
    }
    if len(remembered) < 2:
        return []
    common = set.intersection(*(set(flights) for flights in remembered.values()))
    for number in sorted(common):
        kinds: dict[tuple[Any, ...], list[int]] = {}
        for rank, flights in remembered.items():
            flight = flights[number]
            sizes = tuple(tuple(size) for size in flight["sizes"])
            kinds.setdefault((flight["operation"], sizes, flight["dtype"], flight["purpose"]), []).append(
                rank
            )
        if len(kinds) > 1:
            words = [
                f"{_ranks(ranks)} launched {described(lanes[ranks[0]] or {}, remembered[ranks[0]][number])}"
                for ranks in kinds.values()
            ]
            return ["ranks differ: " + ", but ".join(words) + "; one of them skipped or added a collective"]
    return []


def _lane(report: Report, identity: str) -> Mapping[str, Any] | None:
    return next((lane for lane in report["lanes"] if lane["id"] == identity), None)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
