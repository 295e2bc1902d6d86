"""megatron/tools/plot_metrics.py: what it reads, draws, says and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron.tools.plot_metrics import main, read_metrics, summary


def write_lines(path: Path, lines: list[dict[str, float] | str]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    return write_lines(
        tmp_path / "metrics.jsonl",
        [
            {"iteration": 10, "lm_loss": 7.0, "learning_rate": 1e-3},
            {"iteration": 20, "lm_loss": 6.0, "learning_rate": 1e-3},
            {"iteration": 20, "lm_loss_validation": 6.1},
            {"iteration": 20, "lm_loss": 5.5, "learning_rate": 2e-3},  # repeated after a resume
            {"iteration": 30, "lm_loss": 4.0, "learning_rate": 1e-3},
            {"iteration": 30, "lm_loss_validation": 4.5},
        ],
    )


def test_later_lines_of_an_iteration_count(metrics: Path) -> None:
    series = read_metrics(metrics)
    assert series["lm_loss"].iterations == (10, 20, 30)
    assert series["lm_loss"].values == (7.0, 5.5, 4.0)
    assert series["lm_loss_validation"].values == (6.1, 4.5)


def test_writes_a_picture(metrics: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "loss.png"
    assert main([str(metrics), "--output", str(output)]) == 0
    assert output.read_bytes().startswith(b"\x89PNG")
    assert "validation loss after iteration 30: 4.500" in capsys.readouterr().out


def test_two_runs_in_one_picture(metrics: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = write_lines(tmp_path / "other.jsonl", [{"iteration": 1, "lm_loss": 3.0}])
    assert main([str(metrics), str(other), "--output", str(tmp_path / "both.svg")]) == 0
    assert "other: training loss after iteration 1: 3.000" in capsys.readouterr().out
    assert "other: training" in (tmp_path / "both.svg").read_text()


def test_summary_compares_with_the_unigram_entropy(metrics: Path) -> None:
    series = read_metrics(metrics)
    assert summary(series, 6.0)[-1] == "the validation loss is 1.500 nats per token below the unigram entropy"
    assert "ABOVE" in summary(series, 4.0)[-1]


def test_require_below(metrics: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A corpus of 256 equally frequent tokens has an entropy of log(256) = 5.545; the run ends at 4.5."""
    from megatron.train.data.core_import import import_core_datasets

    import_core_datasets()
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "text.bin"), dtype=np.uint16)
    builder.add_document(np.arange(256, dtype=np.uint16), [256])
    builder.finalize(str(tmp_path / "text.idx"))
    words = [
        str(metrics),
        "--output",
        str(tmp_path / "a.png"),
        "--unigram-entropy-of",
        str(tmp_path / "text"),
    ]
    assert main([*words, "--require-below", "1"]) == 0
    assert "unigram entropy of the text: 5.545" in capsys.readouterr().out
    assert main([*words, "--require-below", "1.1"]) == 2
    assert "not 1.1 nats per token below" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "no metrics in it yet"),
        (["not json", {"iteration": 1, "lm_loss": 1.0}], "line 1"),
        ([{"lm_loss": 1.0}, {"iteration": 1, "lm_loss": 1.0}], "line 1"),
    ],
)
def test_bad_files_are_named(
    lines: list[dict[str, float] | str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_lines(tmp_path / "bad.jsonl", lines)
    assert main([str(path)]) == 2
    error = capsys.readouterr().err
    assert str(path) in error and message in error and error.count("\n") == 1


def test_missing_file_and_unwritable_output(
    metrics: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "none.jsonl")]) == 2
    assert main([str(metrics), "--output", str(tmp_path / "no_folder" / "loss.png")]) == 2
    assert "no_folder" in capsys.readouterr().err


def test_cut_last_line_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "killed.jsonl"
    path.write_text('{"iteration": 1, "lm_loss": 2.0}\n{"iteration": 2, "lm_l')
    assert read_metrics(path)["lm_loss"].values == (2.0,)
