"""The soak over random legal configurations (scripts/fuzz_layouts.py), and that it would tell."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.functional import fuzz
from tests.functional.cases import ROOT

SEEDS = range(1, 21)
MANY = range(1000, 1300)
MAX_RANKS = 4


def hold(seed: int, max_ranks: int) -> None:
    drawn = fuzz.draw(seed, max_ranks)
    text = fuzz.failure(drawn)
    assert text is None, fuzz.report(drawn, text, max_ranks)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_configuration_is_as_one_rank(seed: int) -> None:
    hold(seed, MAX_RANKS)


@pytest.mark.full
@pytest.mark.parametrize("seed", MANY)
def test_many_random_configurations_are_as_one_rank(seed: int) -> None:
    hold(seed, 8 if seed % 3 == 0 else MAX_RANKS)


def test_a_seed_is_one_configuration() -> None:
    for seed in (3, 4):
        one, other = fuzz.draw(seed, 4), fuzz.draw(seed, 4)
        assert one.launch == other.launch and one.plain == other.plain
    assert fuzz.draw(3, 4).launch != fuzz.draw(4, 4).launch


def test_the_plain_run_has_nothing_of_the_layout() -> None:
    for seed in range(30):
        drawn = fuzz.draw(seed, 8)
        assert drawn.plain.ranks == 1
        assert not any("parallel" in word or "recompute" in word for word in drawn.plain.words), drawn.plain


def test_a_failure_prints_the_command_that_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = next(one for seed in range(100) if (one := fuzz.draw(seed, 4)).precision == "fp64")
    numbers = [{"iteration": 1, "lm_loss": 4.0, "grad_norm": 1.0}]
    wrong = [{"iteration": 1, "lm_loss": 4.0 + 1e-6, "grad_norm": 1.0}]
    monkeypatch.setattr(
        fuzz.runs, "in_pool", lambda launch, *_, **__: numbers if launch.ranks == 1 else wrong
    )
    fuzz.plain_metrics.cache_clear()
    text = fuzz.failure(drawn)
    fuzz.plain_metrics.cache_clear()
    assert text is not None and text.startswith("lm loss, step 1")
    command = fuzz.report(drawn, text, 4).rsplit("repeat: ", 1)[1].split()
    done = subprocess.run(
        [sys.executable, *command, "--show"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert " ".join(drawn.launch.words) in done.stdout
