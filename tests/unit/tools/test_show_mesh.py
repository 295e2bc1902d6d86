"""python -m megatron.tools.show_mesh."""

from __future__ import annotations

import pytest

from megatron.parallel.layout import AXES
from megatron.tools.show_mesh import MEANINGS, main


def test_report_of_all_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["--world-size", "8", "--tensor-model-parallel-size", "2", "--expert-model-parallel-size", "2"])
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "8 ranks"
    table = {line.split()[0]: line.split()[1:3] for line in lines[2 : 2 + len(AXES)]}
    assert table["tp"] == ["2", "4"] and table["fsdp"] == ["4", "2"] and table["edp"] == ["2", "4"]
    header, *ranks = lines[3 + len(AXES) :]
    places = [dict(zip(header.split(), map(int, line.split()), strict=True)) for line in ranks]
    assert [p["tp"] for p in places] == [0, 1] * 4
    assert [p["ep"] for p in places] == [0, 0, 1, 1] * 2  # expert-tensor parallel is the tensor-parallel size
    assert [p["etp"] for p in places] == [0, 1] * 4


def test_report_of_one_rank_in_a_big_world(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--world-size", "4096", "--tensor-model-parallel-size", "8", "--rank", "17"]) == 0
    out = capsys.readouterr().out
    assert "tp         at 1 of [16, 17, 18, 19, 20, 21, 22, 23]" in out
    assert "dp         at 2 of [1, 9, 17, 25, ... 4089; 512 ranks]" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--world-size", "6", "--tensor-model-parallel-size", "4"], "world size 6"),
        (["--world-size", "4", "--rank", "4"], "--rank 4: ranks are 0 to 3"),
    ],
)
def test_one_line_for_what_does_not_fit(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_every_axis_is_explained() -> None:
    assert MEANINGS.keys() == AXES.keys()
