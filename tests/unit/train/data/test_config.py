"""From Megatron's data flags to a DataConfig."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.train.data import data_config_from_args
from megatron.train.data.config import Blend, parse_blend, split_shares
from tests.unit.train.data.corpora import null_tokenizer


def config_of(**flags: Any) -> Any:
    base = {
        "seq_length": 8,
        "micro_batch_size": 1,
        "global_batch_size": 4,
        "train_iters": 10,
        "eval_iters": 2,
    }
    return data_config_from_args(SimpleNamespace(**{**base, **flags}), null_tokenizer())


@pytest.mark.parametrize(
    ("words", "prefixes", "weights"),
    [
        (["A"], ("A",), None),
        (["A", "B"], ("A", "B"), None),
        (["A", "B", "C"], ("A", "B", "C"), None),
        (["0.3", "A", "7", "B"], ("A", "B"), (0.3, 7.0)),
        (["1", "A"], ("A",), (1.0,)),
    ],
)
def test_blends_are_read_as_megatron_does(words: list[str], prefixes: Any, weights: Any) -> None:
    assert parse_blend(words, "--data-path") == Blend(prefixes, weights, "--data-path")


@pytest.mark.parametrize(
    "words", [["0.3", "A", "B", "C"], ["0", "A", "1", "B"], ["-1", "A"], ["nan", "A"], []]
)
def test_bad_blends_are_refused(words: list[str]) -> None:
    with pytest.raises(ValueError, match="--valid-data-path"):
        parse_blend(words, "--valid-data-path")


def test_split() -> None:
    assert split_shares("969, 30, 1") == pytest.approx((0.969, 0.03, 0.001))
    assert split_shares("100,0") == (1, 0, 0)
    for wrong in ("", "a,b", "1,2,3,4", "0,0,0", "-1,2", "nan", "inf"):
        with pytest.raises(ValueError, match="--split"):
            split_shares(wrong)


def test_samples_are_counted_as_in_megatron() -> None:
    config = config_of(data_path=["A"], eval_interval=4)
    assert (config.train_samples, config.valid_samples, config.test_samples) == (40, 3 * 8, 8)
    assert config_of(data_path=["A"]).valid_samples == 8
    by_samples = config_of(data_path=["A"], train_iters=None, train_samples=40, eval_interval=4)
    assert (by_samples.train_samples, by_samples.valid_samples) == (40, 24)
    assert config_of(data_path=["A"], eval_iters=0, full_validation=True).samples(1) == 0
    assert config_of(data_path=["A"], full_validation=True).samples(1) is None


def test_sources(tmp_path: Path) -> None:
    assert config_of(data_path=["A"]).split == "969, 30, 1"
    assert config_of(mock_data=True).mock
    per_split = config_of(train_data_path=["A"], valid_data_path=["1", "B"])
    assert per_split.split is None
    assert per_split.blend_per_split == (
        Blend(("A",), None, "--train-data-path"), Blend(("B",), (1.0,), "--valid-data-path"), None
    )  # fmt: skip
    file = tmp_path / "blend.txt"
    file.write_text("0.3 A\n0.7 B\n")
    assert config_of(data_args_path=str(file)).blend == Blend(("A", "B"), (0.3, 0.7), "--data-args-path")
    file.write_text(json.dumps({"train": ["1", "A", "2", "B"], "valid": "C D", "test": None}))
    flag = "--per-split-data-args-path"
    assert config_of(per_split_data_args_path=str(file)).blend_per_split == (
        Blend(("A", "B"), (1.0, 2.0), flag), Blend(("C", "D"), None, flag), None
    )  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        ({}, "--data-path is missing"),
        ({"data_path": ["A"], "mock_data": True}, "--data-path and --mock-data contradict"),
        ({"data_path": ["A"], "valid_data_path": ["B"]}, "--data-path and --train-data-path.* contradict"),
        ({"train_data_path": ["A"], "split": "1,1,1"}, "--split 1,1,1 does not go with data paths per split"),
        ({"data_path": ["A"], "split": "x"}, "--split 'x'"),
        ({"data_path": ["A"], "dataloader_type": "external"}, "--dataloader-type external"),
        ({"data_path": ["1", "A", "1", "B"], "full_validation": True}, "--full-validation"),
        ({"data_path": ["A"], "multiple_validation_sets": True}, "--multiple-validation-sets"),
        ({"data_path": ["A"], "validation_set_names": ["a"]}, "--validation-set-names a needs"),
        ({"data_path": ["A"], "num_workers": -1}, "--num-workers -1"),
        ({"data_path": ["A"], "seq_length": 0}, "--seq-length 0"),
        ({"data_path": ["A"], "global_batch_size": 0}, "--global-batch-size 0"),
        ({"data_args_path": "/none"}, "--data-args-path /none cannot be read"),
        ({"per_split_data_args_path": __file__}, "--per-split-data-args-path .* must be JSON"),
    ],
)
def test_bad_flags_are_refused(flags: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        config_of(**flags)
