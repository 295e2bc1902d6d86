"""The generated cases: as the script chooses them, every pair that can meet does, every reason is true."""

from __future__ import annotations

import itertools

import pytest

from megatron.train.arguments import parse_args, validate
from tests.functional import cover, runs
from tests.functional.cases import Launch, all_cases
from tests.functional.features import AXES, DEFAULTS, RULES, SCRIPTS, Sizes, possible, run_flags, words
from tests.functional.hooks import entered, transformer_engine_on_cpu


def test_cases_and_table_are_as_the_script_writes_them() -> None:
    assert cover.differences(cover.files()) == []


def test_every_pair_meets_but_the_impossible_ones() -> None:
    cells = [case.features for case in all_cases() if case.features]
    assert len(cells) >= 40
    met = set().union(*(cover.tuples_of(cell, 2) for cell in cells))
    can, cannot = cover.possible_pairs()
    assert can == met and not met & set(cannot)
    assert all(cannot.values())
    total = sum(len(AXES[a]) * len(AXES[b]) for a, b in itertools.combinations(AXES, 2))
    assert len(can) + len(cannot) == total


def test_the_default_run_touches_every_feature() -> None:
    cases = [case for case in all_cases() if case.default]
    assert len(cases) <= 16 and all(launch.ranks <= 4 for case in cases for launch in case.launches)
    touched = {item for case in cases for item in case.features.items()}
    assert touched == {(axis, value) for axis in AXES for value in AXES[axis]}


def test_every_case_is_legal_and_one_rank_runs_are_shared() -> None:
    for case in all_cases():
        with entered(case.cpu_hooks.replace(cover.TE_HOOK, "")):
            for launch in (*case.launches, case.one_rank):
                config = validate(parse_args(runs.command_line(launch)), launch.ranks, "cpu")
                assert config.global_batch_size == 8
        assert (
            validate(parse_args(runs.command_line(case.one_rank)), 1, "cpu").sharding_strategy == "no_shard"
        )
    assert len({case.one_rank_key for case in all_cases()}) <= 14


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.reason.startswith("refused")], ids=str)
def test_what_is_said_to_be_refused_is(rule: object) -> None:
    (first, firsts), (second, seconds) = rule.first, rule.second  # type: ignore[attr-defined]
    for one, other in itertools.product(firsts, seconds):
        cell = {**DEFAULTS, first: one, second: other}
        launch = Launch(SCRIPTS["gpt"], Sizes.of(cell).world, tuple(words(run_flags(cell))))
        with pytest.raises(ValueError, match="--"):
            validate(parse_args(runs.command_line(launch)), launch.ranks, "cpu")


def test_a_broken_rule_is_seen_in_a_part_of_a_cell() -> None:
    assert not possible({"model": "gpt", "experts": "ep2"})
    assert possible({"model": "mixtral", "experts": "ep2"})
    assert not possible({"outer": "hfsdp", "zero": "zero1"})


def test_transformer_engine_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook keeps the flag's value; without it CPU runs fall back to the torch backend."""
    monkeypatch.setattr("tests.te.engine.load", lambda: None)  # this process stays without the emulator
    launch = next(case for case in all_cases() if case.cpu_hooks).launches[0]
    words_ = runs.command_line(launch)
    assert validate(parse_args(words_), launch.ranks, "cpu").transformer_impl == "local"
    with transformer_engine_on_cpu():
        config = validate(parse_args(words_), launch.ranks, "cpu")
    assert config.transformer_impl == "transformer_engine"
    assert not any("--transformer-impl" in line for line in config.warnings)
