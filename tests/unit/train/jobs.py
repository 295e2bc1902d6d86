"""Whole training jobs inside pool workers: what main.py does, without a command line's process around it."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megatron.train.arguments import parse_args, validate
from megatron.train.build import Run, build_run
from megatron.train.errors import is_users
from megatron.train.initialize import Launch, seed_everything
from megatron.train.loop import train
from megatron.train.metrics import Reporter
from megatron.train.report import build_reporter
from tests.mock_data import shrink_mock_data

TINY = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 12 --micro-batch-size 2 --lr 0.01 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 30 --make-vocab-size-divisible-by 8 --num-workers 0 "
    "--log-interval 1 --eval-iters 2 --use-megatron-fsdp --lr-decay-style cosine "
    "--weight-decay 0.1 --log-params-norm --log-num-zeros-in-grad"
).split()


@dataclass
class Outcome:
    """What one rank saw: numbers by iteration, text, weights at the end, and the error that ended it."""

    numbers: list[dict[str, float]] = field(default_factory=list)
    text: str = ""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    optimizer: dict[str, dict[str, Any]] = field(default_factory=dict)
    error: str | None = None
    users: bool = False

    def series(self, name: str) -> list[float]:
        """The values of one metric, in order."""
        return [numbers[name] for numbers in self.numbers if name in numbers]


_ABOUT_THE_MACHINE = tuple(
    "iteration_time tokens_per_second throughput memory_mib world_size time/ straggler/".split()
)


class _Recorder:
    """A sink that keeps what depends on the numbers and not on the clock."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome

    def write(self, iteration: int, values: Mapping[str, float]) -> None:
        kept = {name: value for name, value in values.items() if not name.startswith(_ABOUT_THE_MACHINE)}
        self.outcome.numbers.append({"iteration": iteration, **kept})

    def close(self) -> None:
        pass


def build(rank: int, world: int, words: list[str]) -> Run:
    """What main.py builds, on the pool's process group, with less mock data."""
    shrink_mock_data()
    files = any(word.endswith("-data-path") or word == "--data-path" for word in words)
    tiny = [word for word in TINY if word != "--mock-data" or not files]
    config = validate(parse_args([*tiny, *words]), world, "cpu")
    seed_everything(config.seed)
    return build_run(config, Launch(rank, world, rank, world), torch.device("cpu"))


def run_job(rank: int, world: int, words: list[str]) -> Outcome:
    """Run a whole job; an exception becomes part of the outcome."""
    outcome = Outcome()
    stream = io.StringIO()
    try:
        run = build(rank, world, words)
        options = build_reporter(run, stream).options
        reporter = Reporter(options, (_Recorder(outcome),), stream, run.device)
        train(run, reporter)
        for name, parameter in run.state.model.named_parameters():
            outcome.weights[name] = parameter.full_tensor().clone()
    except Exception as error:
        outcome.error, outcome.users = str(error), is_users(error)
    outcome.text = stream.getvalue()
    return outcome


def run_jobs(rank: int, world: int, jobs: list[list[str]]) -> list[Outcome]:
    """Several jobs one after the other; all ranks finish one before any begins the next."""
    outcomes = []
    for words in jobs:
        outcomes.append(run_job(rank, world, words))
        dist.barrier()
    return outcomes
