"""Draw a pipeline schedule: python -m megatron.tools.show_schedule --schedule 1f1b --ranks 4 --microbatches 8.

One row for each rank, one column for each unit of time; F forward, B backward, I and W its halves, then the microbatch.
Chunks after the first are marked by a letter (b, c, ...). With --png the same as a picture.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.parallel.pipeline.actions import Compute, Kind, PipelineShape
from megatron.parallel.pipeline.lower import COSTS, lower
from megatron.parallel.pipeline.schedules import SCHEDULES, make_schedule
from megatron.parallel.pipeline.simulator import Report, simulate
from megatron.tools.picture import save_picture

COLOURS = {Kind.FORWARD: "#7aa6da", Kind.BACKWARD: "#8fbf8f", Kind.INPUT: "#8fd0c8", Kind.WEIGHT: "#e0b878"}


def label(action: Compute, num_ranks: int) -> str:
    """F3, or F3b for the second chunk of a rank."""
    chunk = action.stage // num_ranks
    return f"{action.kind.value}{action.microbatch}{chr(ord('a') + chunk) if chunk else ''}"


def text(report: Report, shape: PipelineShape) -> str:
    """The schedule as lines of characters, and what it costs."""
    steps = round(report.makespan)
    rows = [["."] * steps for _ in range(shape.num_ranks)]
    for action, (start, end) in report.spans.items():
        row = rows[shape.rank_of(action.stage)]
        row[round(start)] = label(action, shape.num_ranks)
        for column in range(round(start) + 1, round(end)):
            row[column] = "-"
    width = max(len(cell) for row in rows for cell in row)
    lines = [
        f"rank {rank:<3}|" + " ".join(cell.ljust(width) for cell in row).rstrip()
        for rank, row in enumerate(rows)
    ]
    return "\n".join([*lines, *summary(report)])


def summary(report: Report) -> list[str]:
    """Time, bubble and peak activations."""
    peaks = ", ".join(map(str, report.peak_in_flight))
    return [
        f"time {report.makespan:g} (a forward is {COSTS[Kind.FORWARD]:g}, a backward {COSTS[Kind.BACKWARD]:g})",
        f"bubble {100 * report.bubble:.1f} % of all ranks' time",
        f"most microbatches in flight, by rank: {peaks}",
    ]


def draw(report: Report, shape: PipelineShape, title: str, path: Path) -> None:
    """The schedule as a PNG at `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    width = min(40.0, 2 + 0.28 * report.makespan)
    figure, axes = pyplot.subplots(figsize=(width, 1.2 + 0.45 * shape.num_ranks))
    for action, (start, end) in report.spans.items():
        rank = shape.rank_of(action.stage)
        shade = 1.0 - 0.55 * (action.stage // shape.num_ranks) / max(1, shape.num_chunks)
        axes.barh(
            rank, end - start, left=start, height=0.9, color=COLOURS[action.kind], alpha=shade,
            edgecolor="white", linewidth=0.5,
        )  # fmt: skip
        axes.text((start + end) / 2, rank, str(action.microbatch), ha="center", va="center", fontsize=7)
    axes.set_yticks(range(shape.num_ranks), [f"rank {rank}" for rank in range(shape.num_ranks)])
    axes.invert_yaxis()
    axes.set_xlim(0, report.makespan)
    axes.set_xlabel("time")
    axes.set_title(f"{title}: bubble {100 * report.bubble:.1f} %")
    used = {action.kind for action in report.spans}
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=COLOURS[kind]) for kind in Kind if kind in used]
    axes.legend(handles, [kind.name.lower() for kind in Kind if kind in used], loc="upper right", fontsize=7)
    figure.tight_layout()
    save_picture(figure, "--png", path)
    pyplot.close(figure)


def main(words: Sequence[str] | None = None) -> int:
    """The command; 2 for sizes that the schedule does not allow, or a picture that cannot be written."""
    parser = argparse.ArgumentParser(prog="show_schedule", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--schedule", choices=sorted(SCHEDULES), default="1f1b")
    parser.add_argument("--ranks", type=int, default=4, help="pipeline ranks")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--chunks", type=int, default=1, help="virtual stages on each rank")
    parser.add_argument("--group", type=int, default=None, help="microbatches through a chunk in a row")
    parser.add_argument("--png", type=Path, default=None, help="also draw it into this file")
    options = parser.parse_args(words)
    try:
        shape = PipelineShape(options.ranks, options.microbatches, options.chunks)
        programs = lower(make_schedule(options.schedule, shape, options.group), shape)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report = simulate(programs, shape)
    print(text(report, shape))
    if options.png is not None:
        title = f"{options.schedule}, {options.ranks} ranks, {options.microbatches} microbatches"
        try:
            draw(report, shape, title, options.png)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        print(f"drawn into {options.png}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
