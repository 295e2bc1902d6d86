"""Flags of the loop and its reports, in jobs with and without them: what changes, and that nothing else does."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from megatron.train import main as main_module
from megatron.train.data import build_data_iterators
from megatron.train.initialize import Launch
from tests.pool import run_ranks
from tests.unit.train import jobs
from tests.unit.train.data.corpora import data_config, unique_documents, write_corpus
from tests.unit.train.jobs import TINY, Outcome

QUIET = "--hidden-dropout 0 --attention-dropout 0 --global-batch-size 4 --eval-iters 0"
LOGGED = ("--log-params-norm", "--log-num-zeros-in-grad")


def collections(rank: int, world: int, words: list[str]) -> tuple[Outcome, int, int]:
    """A job, how often Python's collector was turned off, and how often it was asked to collect."""
    with mock.patch("gc.disable") as disable, mock.patch("gc.collect") as collect:
        outcome = jobs.run_job(rank, world, words)
        return outcome, disable.call_count, collect.call_count


def test_garbage_is_collected_by_hand_where_asked() -> None:
    found = [
        run_ranks(collections, 1, f"{QUIET} --train-iters 5 {words}".split(), timeout=120)[0]
        for words in ("", "--manual-gc", "--manual-gc --manual-gc-interval 2")
    ]
    assert [one[1] for one in found] == [0, 1, 1]
    calls = [one[2] for one in found]
    assert calls[1] == calls[0] + 1 and calls[2] == calls[1] + 2
    assert found[0][0].numbers == found[2][0].numbers


def signalled(rank: int, world: int, words: list[str]) -> Outcome:
    """A job that gets SIGUSR2 while it reads its third batch."""
    from megatron.train import loop

    original, calls = loop.local_batch, iter(range(1, 10**6))

    def local_batch(*arguments: Any) -> Any:
        if next(calls) == 3:
            os.kill(os.getpid(), signal.SIGUSR2)
        return original(*arguments)

    with mock.patch.object(loop, "local_batch", local_batch):
        return jobs.run_job(rank, world, words)


def test_the_signal_that_ends_a_run_can_be_chosen(tmp_path: Path) -> None:
    words = f"{QUIET} --train-iters 100 --exit-signal-handler --exit-signal SIGUSR2 --save {tmp_path}"
    outcome = run_ranks(signalled, 1, words.split(), timeout=120)[0]
    assert outcome.error is None and "a signal" in outcome.text
    (folder,) = tmp_path.glob("iter_*")
    assert outcome.numbers[-1]["iteration"] == int(folder.name.removeprefix("iter_")) < 100


def bare(rank: int, world: int, lists: list[list[str]]) -> list[Outcome]:
    """Jobs whose report has only what their words ask for."""
    with mock.patch.object(jobs, "TINY", [word for word in TINY if word not in LOGGED]):
        return jobs.run_jobs(rank, world, lists)


def test_norms_zeros_and_throughput_are_reported_where_asked() -> None:
    plain, full = run_ranks(
        bare,
        1,
        [
            f"{QUIET} --train-iters 2 {' '.join(words)}".split()
            for words in ((), (*LOGGED, "--log-throughput"))
        ],
        timeout=120,
    )[0]
    for name in ("params_norm", "num_zeros"):
        assert plain.series(name) == [] and len(full.series(name)) == 2
    assert "throughput per GPU" in full.text and "throughput per GPU" not in plain.text
    squares = sum(float(weight.double().square().sum()) for weight in full.weights.values())
    assert full.series("params_norm")[-1] == pytest.approx(squares**0.5, rel=1e-6)
    assert plain.series("lm_loss") == full.series("lm_loss")


@pytest.mark.parametrize("mmap", [True, False])
def test_files_are_mapped_or_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mmap: bool) -> None:
    """--no-mmap-bin-files: the same samples without a map of the .bin file."""
    mapped: list[str] = []
    original = np.memmap

    def memmap(path: Any, *arguments: Any, **options: Any) -> Any:
        mapped.append(str(path))
        return original(path, *arguments, **options)

    prefix = write_corpus(tmp_path / "corpus", unique_documents([30] * 8))
    config = replace(data_config(prefix), mmap_bin_files=mmap)
    monkeypatch.setattr(np, "memmap", memmap)
    train = build_data_iterators(config).train
    assert train is not None
    mapped.clear()
    core_maps = [name for name in _bin_readers(train) if "MMap" in name]
    assert bool(core_maps) == mmap
    assert next(train)["tokens"].shape == (2, 8)


def _bin_readers(iterator: Any) -> list[str]:
    """Names of the classes that read .bin files for an iterator."""
    found, seen, left = [], set(), [iterator]
    while left:
        each = left.pop()
        if id(each) in seen or not hasattr(each, "__dict__"):
            continue
        seen.add(id(each))
        if type(each).__name__.endswith("BinReader"):
            found.append(type(each).__name__)
        left += vars(each).values()
    return found


@pytest.mark.parametrize("minutes", [10, 77])
def test_minutes_until_a_collective_is_given_up(monkeypatch: pytest.MonkeyPatch, minutes: int) -> None:
    """--distributed-timeout-minutes, and a little more, so that the watchdog speaks first."""
    seen: list[float] = []

    def initialize(launch: Launch, options: Any) -> None:
        seen.append(options.timeout_minutes)
        raise KeyboardInterrupt

    monkeypatch.setattr(main_module, "initialize_distributed", initialize)
    monkeypatch.setattr(main_module, "prepare_environment", lambda config: None)
    words = [*TINY, "--train-iters", "1", "--distributed-timeout-minutes", str(minutes)]
    with contextlib.suppress(KeyboardInterrupt):
        main_module._run(words, None, Launch(0, 1, 0, 1))
    assert seen == [minutes + 2.0]


def test_names_of_a_wandb_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.train import report

    seen: list[Any] = []
    monkeypatch.setattr(report, "WeightsAndBiases", lambda options, config: seen.append(options))
    config = SimpleNamespace(
        wandb_project=None, wandb_exp_name="name", wandb_entity="entity", wandb_save_dir="folder",
        save=None, tensorboard_dir=None, log_timers_to_tensorboard=True, log_memory_to_tensorboard=True,
        log_world_size_to_tensorboard=True, log_loss_scale_to_tensorboard=True,
        log_validation_ppl_to_tensorboard=True, as_dict=dict,
    )  # fmt: skip
    run: Any = SimpleNamespace(config=config)
    assert report._boards(run) == [] and seen == []
    config.wandb_project = "project"
    report._boards(run)
    (options,) = seen
    values = vars(options) if hasattr(options, "__dict__") else options._asdict()
    assert [*values.values()][:4] == ["project", "name", "entity", "folder"]
