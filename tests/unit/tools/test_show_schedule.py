"""The drawing of schedules."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.tools.show_schedule import main


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--ranks", "2", "--microbatches", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "rank 0  |F0 F1 .  .  B0 -  .  B1 -",
        "rank 1  |.  F0 B0 -  F1 B1 -  .  .",
        "time 9 (a forward is 1, a backward 2)",
        "bubble 33.3 % of all ranks' time",
        "most microbatches in flight, by rank: 2, 1",
    ]


def test_png(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "schedule.png"
    assert main(["--schedule", "interleaved", "--chunks", "2", "--png", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000
    assert "F0b" in capsys.readouterr().out


def test_sizes_that_do_not_fit_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--chunks", "2"]) == 2
    assert capsys.readouterr().err == (
        "error: 1f1b has one chunk on each rank, not 2: use the interleaved schedule\n"
    )


@pytest.mark.parametrize(("name", "reason"), [("nowhere/x.png", "No such file"), ("x.foo", "Format 'foo'")])
def test_a_picture_that_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, reason: str
) -> None:
    assert main(["--ranks", "2", "--microbatches", "2", "--png", str(tmp_path / name)]) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"error: --png {tmp_path / name}: {reason}") and line.count("\n") == 1
