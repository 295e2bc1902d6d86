"""Draws the loss curves of runs from their --metrics-file.

    python -m megatron.tools.plot_metrics runs/a/metrics.jsonl [runs/b/metrics.jsonl ...] --output loss.png \
        [--unigram-entropy-of data/corpus_text_document]

With --unigram-entropy-of the loss of a model that only knows how frequent each token is becomes a line in the
picture and, beside the last losses, a number on the terminal.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.tools.picture import save_picture

TRAINING = "lm_loss"
VALIDATION = "lm_loss_validation"
LEARNING_RATE = "learning_rate"


@dataclass(frozen=True)
class Series:
    """One number over iterations, in the order of the iterations."""

    iterations: tuple[int, ...]
    values: tuple[float, ...]


def read_metrics(path: str | Path) -> dict[str, Series]:
    """Return the series of a metrics file by name.

    A resumed run appends: where an iteration is there twice the later line counts.

    Raises:
        ValueError: the file cannot be read, a line is no JSON object (its number is named), or nothing is in it.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; give the --metrics-file of a run") from None
    points: dict[str, dict[int, float]] = {}
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line)
            iteration = int(values.pop("iteration"))
        except (ValueError, KeyError, AttributeError, TypeError):
            if number == len(lines):
                continue  # the last line of a run that was killed may be cut
            raise ValueError(f"{path}, line {number}: no line of a metrics file: {line[:60]!r}") from None
        for name, value in values.items():
            points.setdefault(name, {})[iteration] = value
    if not points:
        raise ValueError(f"{path}: no metrics in it yet; wait for the run's first --log-interval")
    ordered = {name: sorted(series.items()) for name, series in points.items()}
    return {name: Series(*zip(*series, strict=True)) for name, series in ordered.items()}


def draw(
    runs: dict[str, dict[str, Series]], output: str | Path, unigram_entropy: float | None = None
) -> None:
    """Write a picture of training and validation loss (nats per token) and learning rate over iterations.

    Args:
        runs: series of `read_metrics` by the name that the legend shows.
        output: file to write; its ending chooses the format.
        unigram_entropy: nats per token, drawn as a line.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (losses, rates) = pyplot.subplots(
        2, 1, figsize=(8, 6), sharex=True, height_ratios=(4, 1), layout="constrained"
    )
    for index, (name, series) in enumerate(runs.items()):
        prefix, color = (f"{name}: " if len(runs) > 1 else ""), f"C{index}"
        if TRAINING in series:
            losses.plot(*_xy(series[TRAINING]), color=color, alpha=0.6, label=f"{prefix}training")
        if VALIDATION in series:
            losses.plot(*_xy(series[VALIDATION]), "o-", color=color, label=f"{prefix}validation")
        if LEARNING_RATE in series:
            rates.plot(*_xy(series[LEARNING_RATE]), color=color)
    if unigram_entropy is not None:
        losses.axhline(unigram_entropy, color="grey", linestyle="--", label="unigram entropy")
    losses.set_ylabel("loss (nats per token)")
    losses.grid(alpha=0.3)
    losses.legend()
    rates.set_ylabel("learning rate")
    rates.set_xlabel("iteration")
    rates.grid(alpha=0.3)
    save_picture(figure, "--output", output)
    pyplot.close(figure)


def _xy(series: Series) -> tuple[tuple[int, ...], tuple[float, ...]]:
    return series.iterations, series.values


def summary(series: dict[str, Series], unigram_entropy: float | None = None) -> list[str]:
    """The last losses of a run in words."""
    lines = []
    for name, word in ((TRAINING, "training"), (VALIDATION, "validation")):
        if name in series:
            loss, iteration = series[name].values[-1], series[name].iterations[-1]
            lines.append(f"{word} loss after iteration {iteration}: {loss:.3f} nats per token")
    if unigram_entropy is not None:
        lines.append(f"unigram entropy of the text: {unigram_entropy:.3f} nats per token")
        if VALIDATION in series:
            below = unigram_entropy - series[VALIDATION].values[-1]
            text = f"{abs(below):.3f} nats per token {'below' if below >= 0 else 'ABOVE'} the unigram entropy"
            lines.append(f"the validation loss is {text}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status: 0, or 2 after one line on what is wrong."""
    args = _parser().parse_args(argv)
    try:
        runs = {_label(path): read_metrics(path) for path in args.metrics}
        entropy = None
        if args.unigram_entropy_of:
            from megatron.train.data.entropy import unigram_entropy

            entropy = unigram_entropy(args.unigram_entropy_of)
        draw(runs, args.output, entropy)
        for name, series in runs.items():
            for line in summary(series, entropy):
                print(line if len(runs) == 1 else f"{name}: {line}")
        last = [series[VALIDATION].values[-1] for series in runs.values() if VALIDATION in series]
        if args.require_below is not None and not (
            last and entropy is not None and max(last) <= entropy - args.require_below
        ):
            wanted = f"{args.require_below:g} nats per token below the unigram entropy"
            raise ValueError(f"--require-below: the validation loss is not {wanted}; train longer")
    except ValueError as error:
        print(f"plot_metrics: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"plot_metrics: {error.filename or args.output}: {error.strerror}", file=sys.stderr)
        return 2
    return 0


def _label(path: str) -> str:
    """The run's folder, or the file's name."""
    return Path(path).resolve().parent.name if Path(path).name == "metrics.jsonl" else Path(path).stem


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="plot_metrics", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("metrics", nargs="+", help="files written by --metrics-file")
    parser.add_argument("--output", default="loss.png", help="picture to write (default: loss.png)")
    parser.add_argument("--unigram-entropy-of", metavar="PREFIX", help="the .bin/.idx pair of the text")
    parser.add_argument(
        "--require-below",
        type=_nats,
        metavar="NATS",
        help="fail unless the last validation loss is this far below the unigram entropy",
    )
    return parser


def _nats(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is no finite number")
    return value


if __name__ == "__main__":
    sys.exit(main())
