"""Puts the metrics of one or several runs on one self-contained HTML page, with plots; several are compared.

    python -m megatron.tools.report runs/a/metrics.jsonl [runs/b/metrics.jsonl ...] --output report.html

The files are those of --metrics-file. The page needs no network and no other file. With several runs each number is
compared with the first run's.
"""

from __future__ import annotations

import argparse
import html
import io
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.tools.plot_metrics import Series, read_metrics

Run = Mapping[str, Series]

# Title of a panel -> beginnings of the names in it, in the order of the page; what is in none gets a panel of its own.
PANELS = {
    "Loss (nats per token)": ("lm_loss", "lm_loss_validation", "lm_loss_test"),
    "Learning rate": ("learning_rate",),
    "Norms": ("grad_norm", "params_norm"),
    "TFLOP/s of a device": ("throughput",),
    "Share of the device's peak (MFU)": ("mfu",),
    "Tokens per second": ("tokens_per_second",),
    "Seconds an iteration": ("iteration_time",),
    "Seconds a phase": ("time/",),
    "Own time of ranks (s)": ("straggler/",),
    "Memory (MiB)": ("memory_mib", "memory/"),
    "Losses of layers": ("load_balancing_loss", "seq_load_", "global_load_", "z_loss", "mtp_loss"),
    "Load of experts": ("max_expert_load", "expert_load/"),
    "Zero gradients": ("num_zeros",),
    "Loss scale": ("loss_scale",),
    "Skipped steps": ("skipped_iterations", "nan_iterations"),
    "Norms of parameters": ("param_norm/",),
    "Norms of gradients": ("grad_norm/",),
}
_HIDDEN = ("consumed_samples", "world_size", "lm_loss_validation_ppl", "lm_loss_test_ppl")
_MAX_LINES = 12
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:75em;color:#222}"
    "h1{font-size:1.5em}h2{font-size:1.15em;margin:1.6em 0 .2em}"
    "table{border-collapse:collapse;margin:1em 0}td,th{padding:.25em .8em;border-bottom:1px solid #ddd;"
    "text-align:right}td:first-child,th:first-child{text-align:left}"
    "section{display:inline-block;vertical-align:top;margin-right:1em}svg{max-width:100%;height:auto}"
    "small{color:#666}"
)


@dataclass(frozen=True)
class Figure:
    """One number of the summary. value: of a run; None where it has none. better: -1 less, 1 more, 0 neither."""

    title: str
    unit: str
    names: tuple[str, ...]
    take: str
    better: int = 0


SUMMARY = (
    Figure("iterations", "", ("lm_loss",), "iterations"),
    Figure("last training loss", "nats", ("lm_loss",), "last", -1),
    Figure("best validation loss", "nats", ("lm_loss_validation",), "least", -1),
    Figure("last test loss", "nats", ("lm_loss_test",), "last", -1),
    Figure("median iteration", "s", ("iteration_time",), "median", -1),
    Figure("median tokens per second", "", ("tokens_per_second",), "median", 1),
    Figure("median throughput of a device", "TFLOP/s", ("throughput",), "median", 1),
    Figure("median MFU", "", ("mfu",), "median", 1),
    Figure("largest memory", "MiB", ("memory_mib",), "most", -1),
    Figure("skipped steps", "", ("skipped_iterations",), "sum", -1),
)


def value_of(figure: Figure, run: Run) -> float | None:
    """A figure of the summary; None where the run does not have its numbers."""
    series = run.get(figure.names[0])
    if series is None:
        return None
    values = [value for value in series.values if value is not None and value == value]
    if not values:
        return None
    take = {
        "last": lambda: values[-1],
        "least": lambda: min(values),
        "most": lambda: max(values),
        "median": lambda: statistics.median(values),
        "sum": lambda: sum(values),
        "iterations": lambda: float(series.iterations[-1]),
    }[figure.take]
    return float(take())


def largest_gap(first: Series, other: Series) -> tuple[float, int] | None:
    """(largest difference, its iteration) of two series over the iterations that both have; None without any."""
    known = dict(zip(first.iterations, first.values, strict=True))
    gaps = [
        (abs(value - known[iteration]), iteration)
        for iteration, value in zip(other.iterations, other.values, strict=True)
        if iteration in known
    ]
    return max(gaps) if gaps else None


def panels(runs: Mapping[str, Run]) -> dict[str, list[str]]:
    """Names of all runs' numbers by panel, in the order of the page."""
    names = sorted({name for run in runs.values() for name in run} - set(_HIDDEN))
    found: dict[str, list[str]] = {}
    for title, beginnings in PANELS.items():
        members = [name for name in names if _belongs(name, beginnings)]
        if members:
            found[title] = members
    placed = {name for members in found.values() for name in members}
    return found | {name: [name] for name in names if name not in placed}


def _belongs(name: str, beginnings: Sequence[str]) -> bool:
    """A beginning that ends in "/" or "_" stands for all names that start so, another for itself and its layers."""
    return any(
        name.startswith(start) if start[-1] in "/_" else name == start or name.startswith(f"{start}/")
        for start in beginnings
        if not (start in ("grad_norm",) and "/" in name)
    )


def plot(names: Sequence[str], runs: Mapping[str, Run]) -> str:
    """An SVG element with the series of these names of all runs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.2, 3.4), layout="constrained")
    styles = ("-", "--", ":", "-.")
    shown = list(names)[:_MAX_LINES]
    for number, (label, run) in enumerate(runs.items()):
        for index, name in enumerate(shown):
            if name in run:
                color = f"C{(number if len(shown) == 1 else index) % 10}"
                style = styles[number % len(styles)] if len(shown) > 1 else "-"
                text = " ".join([*([label] if len(runs) > 1 else []), name])
                few = len(run[name].iterations) < 30
                axes.plot(
                    run[name].iterations, run[name].values, style, color=color, label=text, lw=1.2,
                    marker="." if few else None,
                )  # fmt: skip
    axes.set_xlabel("iteration")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    text = stream.getvalue()
    return text[text.index("<svg") :]


def _table(runs: Mapping[str, Run]) -> str:
    names = list(runs)
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ["", *names])
    rows = []
    for figure in SUMMARY:
        values = [value_of(figure, run) for run in runs.values()]
        if all(value is None for value in values):
            continue
        cells = [f"<td>{figure.title}{f' ({figure.unit})' if figure.unit else ''}</td>"]
        for index, value in enumerate(values):
            cells.append(f"<td>{_cell(value, values[0] if index else None)}</td>")
        rows.append("<tr>" + "".join(cells) + "</tr>")
    if len(names) > 1:
        first = runs[names[0]].get("lm_loss")
        cells = ["<td>largest gap of training loss (nats)</td>", "<td></td>"]
        for name in names[1:]:
            other = runs[name].get("lm_loss")
            gap = largest_gap(first, other) if first and other else None
            cells.append(f"<td>{'' if gap is None else f'{gap[0]:.3g} at {gap[1]}'}</td>")
        rows.append("<tr>" + "".join(cells) + "</tr>")
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def _cell(value: float | None, first: float | None) -> str:
    if value is None:
        return ""
    if first is None or first == 0:
        return f"{value:.6g}"
    return f"{value:.6g} <small>{100 * (value / first - 1):+.2f}%</small>"


def page(runs: Mapping[str, Run], title: str = "Training report") -> str:
    """The whole page.

    runs: series of `read_metrics` by name; the first one is what the others are compared with.
    """
    parts = []
    for name, members in panels(runs).items():
        note = f" <small>first {_MAX_LINES} of {len(members)}</small>" if len(members) > _MAX_LINES else ""
        parts.append(f"<section><h2>{html.escape(name)}{note}</h2>{plot(members, runs)}</section>")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{html.escape(title)}</h1>{_table(runs)}{''.join(parts)}"
        "</body></html>\n"
    )


def label_paths(paths: Sequence[str]) -> dict[str, str]:
    """A short name for each file, no two alike: its folder where it is called metrics.jsonl, else itself."""
    labels: dict[str, str] = {}
    for path in paths:
        where = Path(path).resolve()
        name = where.parent.name if where.name == "metrics.jsonl" else where.stem
        if name in labels:
            name = str(where)
        labels[name] = path
    return labels


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status: 0, or 2 after one line on what is wrong."""
    parser = argparse.ArgumentParser(
        prog="report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "metrics", nargs="+", help="files written by --metrics-file; the first is the reference"
    )
    parser.add_argument("--output", default="report.html", help="page to write (default: report.html)")
    parser.add_argument("--title", default="Training report")
    args = parser.parse_args(argv)
    try:
        runs = {name: read_metrics(path) for name, path in label_paths(args.metrics).items()}
        Path(args.output).write_text(page(runs, args.title), encoding="utf-8")
    except ValueError as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"report: --output {args.output}: {error.strerror}", file=sys.stderr)
        return 2
    print(f"{args.output}: {len(runs)} run(s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
