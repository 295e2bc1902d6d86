"""One page with everything in it: plots, figures, comparison."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megatron.tools.plot_metrics import Series
from megatron.tools.report import largest_gap, main, panels


def write(path: Path, losses: list[float], seconds: float) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        {"iteration": index, "lm_loss": loss, "iteration_time": seconds, "grad_norm": 1.0, "time/optimizer": 0.1,
         "skipped_iterations": 0, "something_new": 3.0, "grad_norm/a.weight": 1.0}
        for index, loss in enumerate(losses, 1)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_data(self, data: str) -> None:
        self.words += data


def test_two_runs_on_one_page(tmp_path: Path) -> None:
    first = write(tmp_path / "a" / "metrics.jsonl", [3.0, 2.0], 0.5)
    second = write(tmp_path / "b<i>" / "metrics.jsonl", [3.0, 2.5], 0.25)
    output = tmp_path / "page.html"
    assert main([first, second, "--output", str(output)]) == 0
    page = Page(output.read_text())
    # Self-contained: nothing but references within the page itself.
    assert all(link.startswith("#") for link in page.links)
    assert "script" not in page.tags and "i" not in page.tags
    assert page.tags.count("section") == page.tags.count("svg") == 7
    assert "2.5 +25.00%" in page.words and "0.25 -50.00%" in page.words
    assert "0.5 at 2" in page.words
    assert "b<i>" in page.words


def test_panels_hold_every_number_once() -> None:
    series = Series((1,), (1.0,))
    names = ["lm_loss", "lm_loss_validation", "grad_norm", "grad_norm/x", "z_loss", "z_loss/layer", "new"]
    found = panels({"a": dict.fromkeys(names, series)})
    assert sorted(name for members in found.values() for name in members) == sorted(names)
    assert found["Norms of gradients"] == ["grad_norm/x"]
    assert found["new"] == ["new"]


def test_largest_gap() -> None:
    first, other = Series((1, 2, 3), (1.0, 2.0, 3.0)), Series((2, 3, 4), (2.5, 3.1, 9.0))
    assert largest_gap(first, other) == (0.5, 2)
    assert largest_gap(first, Series((9,), (1.0,))) is None


def test_a_missing_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none.jsonl")]) == 2
    assert re.fullmatch(r"report: .*none\.jsonl: .*\n", capsys.readouterr().err)
