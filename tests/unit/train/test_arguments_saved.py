"""What comes from a checkpoint's arguments."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron.train.arguments import parse_args, validate
from megatron.train.arguments.saved import complete_from_checkpoint, model_destinations, with_saved_arguments
from megatron.train.checkpoint import Progress, RunRecord, save_checkpoint
from tests.unit.train.test_arguments import RUN, config

TRAINING = (
    "--seq-length 32 --micro-batch-size 2 --train-iters 10 --lr 1e-3 --mock-data "
    "--tokenizer-type ByteLevelTokenizer"
)


def test_explicit_wins_over_the_checkpoint_and_the_checkpoint_over_defaults() -> None:
    """O05: explicit flag > checkpoint's argument > default, and the differences are told."""
    saved = config("--swiglu --norm-epsilon 1e-6 --global-batch-size 8").as_dict()
    arguments = parse_args(f"{TRAINING} --norm-epsilon 1e-4 --num-layers 2".split())
    merged, lines = with_saved_arguments(arguments, saved)
    assert (merged.num_layers, merged.hidden_size, merged.swiglu) == (2, 64, True)
    assert merged.layernorm_epsilon == 1e-4
    assert merged.global_batch_size is None  # sizes of the run stay the run's
    assert merged.explicit == arguments.explicit and arguments.hidden_size is None
    assert "--norm-epsilon: 0.0001 of the command line, although the checkpoint has 1e-06" in lines
    assert "--hidden-size: 64 of the checkpoint, instead of the default None" in lines
    assert any(line.startswith("--num-layers: 2 of the command line") for line in lines)
    assert validate(merged, 1, "cpu").ffn_hidden_size == 128


def test_the_same_arguments_change_nothing() -> None:
    """A resolved configuration merged into its own arguments gives itself."""
    for words in (
        "",
        "--group-query-attention --num-query-groups 2",
        "--swiglu --position-embedding-type rope",
    ):
        made = config(words)
        merged, _ = with_saved_arguments(parse_args(TRAINING.split()), made.as_dict())
        again = validate(merged, 1, "cpu")
        assert {name: again[name] for name in model_destinations()} == {
            name: made[name] for name in model_destinations()
        }
        merged, _ = with_saved_arguments(parse_args([*RUN.split(), *words.split()]), made.as_dict())
        assert validate(merged, 1, "cpu") == made


def test_use_checkpoint_args_reads_the_checkpoint(tmp_path: Path) -> None:
    record = RunRecord(
        progress=Progress(iteration=3),
        model={},
        data={},
        schedule={},
        scaler={},
        arguments=config("--swiglu").as_dict(),
        world_size=4,
    )
    save_checkpoint(tmp_path, {"model.a": torch.zeros(1)}, record)
    words = f"{TRAINING} --load {tmp_path}".split()
    arguments, lines = complete_from_checkpoint(parse_args([*words, "--use-checkpoint-args"]))
    assert arguments.num_layers == 4 and arguments.swiglu and len(lines) > 3
    assert validate(arguments, 2, "cpu").world_size == 2
    untouched = parse_args(words)
    assert complete_from_checkpoint(untouched) == (untouched, [])
    (
        save_checkpoint(tmp_path, {"model.a": torch.zeros(1)}, replace(record, progress=Progress(4)))
        / "run.json"
    ).unlink()
    fallen_back, _ = complete_from_checkpoint(parse_args([*words, "--use-checkpoint-args"]))
    assert vars(fallen_back) == vars(arguments)
    with pytest.raises(ValueError, match="--ckpt-step"):
        complete_from_checkpoint(parse_args([*words, "--use-checkpoint-args", "--ckpt-step", "9"]))
