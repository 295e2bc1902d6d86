"""Functional cases run by a launch (run_case.sh) or, cheaper and with the same numbers, in the warm worker pools."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.functional import check, golden
from tests.functional.cases import ROOT, Case, Launch
from tests.functional.golden import Metrics
from tests.functional.hooks import entered
from tests.pool import run_ranks
from tests.te.engine import run_te_ranks

Lines = list[dict[str, float]]
TIMEOUT = 600.0


class _Lines:
    """A sink that keeps every line."""

    def __init__(self) -> None:
        self.lines: Lines = []

    def write(self, iteration: int, values: Mapping[str, float]) -> None:
        self.lines.append({"iteration": iteration, **values})

    def close(self) -> None:
        pass


def command_line(launch: Launch) -> list[str]:
    """What the launch's script gives to megatron.train.main."""
    if launch.script == "pretrain_deepseek.py":
        from pretrain_deepseek import words

        return words(list(launch.words))
    return list(launch.words)


def train_words(rank: int, world: int, words: list[str], hooks: str = "") -> Lines:
    """megatron.train.main for the words, on the pool's process group; what rank 0 reports (other ranks: nothing)."""
    with entered(hooks):
        from megatron.train.arguments import parse_args, validate
        from megatron.train.build import build_run
        from megatron.train.initialize import Launch as Place
        from megatron.train.initialize import prepare_environment, seed_everything
        from megatron.train.loop import train
        from megatron.train.metrics import Reporter
        from megatron.train.report import build_reporter

        config = validate(parse_args(words), world, "cpu")
        if config.deterministic_mode:
            prepare_environment(config, {})
        seed_everything(config.seed)
        sink = _Lines()
        with contextlib.redirect_stdout(io.StringIO()):
            run = build_run(config, Place(rank, world, rank, world), torch.device("cpu"))
            options = build_reporter(run, io.StringIO()).options
            train(run, Reporter(options, (sink,) if rank == 0 else (), io.StringIO(), run.device))
    dist.barrier()
    return sink.lines


def in_pool(launch: Launch, hooks: str = "", timeout: float = TIMEOUT) -> Lines:
    """Run a launch's command on warm workers."""
    on = run_te_ranks if "transformer_engine" in launch.words else run_ranks
    result: Lines = on(train_words, launch.ranks, command_line(launch), hooks, timeout=timeout)[0]
    return [line for line in result if "lm_loss" in line]


def case_in_pool(case: Case, hooks: str = "") -> list[Metrics]:
    """The metrics of a case's runs, made on warm workers. hooks: beside the case's own."""
    names = ",".join(filter(None, (case.cpu_hooks, hooks)))
    with tempfile.TemporaryDirectory() as folder:
        return [
            golden.select(in_pool(launch.in_folder(folder), names), case.metrics) for launch in case.launches
        ]


def one_rank(case: Case) -> Metrics | None:
    """The case's one-rank run: the kept one, else made on a warm worker; None where the case has none."""
    if case.no_one_rank:
        return None
    if not check.one_rank_path(case).exists():
        check.keep_one_rank(case, in_pool(case.one_rank))
    return check.one_rank_metrics(case)


def launched(case: Case, output: Path, hooks: str = "", platform: str = "cpu") -> list[Metrics]:
    """The metrics of a case's runs, started by run_case.sh. AssertionError with the end of a failed run's log."""
    script = str(ROOT / "tests" / "functional" / "run_case.sh")
    command = [script, case.name, "--output", str(output), "--platform", platform, "--run-only"]
    environment = {**os.environ, "FUNCTIONAL_TEST_HOOKS": hooks}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=900, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return check.read_runs(case, output)


def faults_of(case: Case, runs: list[Metrics]) -> list[str]:
    """All that is wrong with a case's runs."""
    return check.case_faults(case, runs, one_rank(case))


def observed(runs: list[Metrics]) -> dict[str, Any]:
    """Median iteration time in ms and peak memory in MiB of a case's first run, to be looked at."""
    times = sorted(runs[0].get("iteration-time", {0: 0.0}).values())
    memory = runs[0].get("mem-peak", {0: 0.0}).values()
    return {"median ms": 1e3 * times[len(times) // 2], "peak MiB": max(memory)}
