"""Launch variables of torchrun, SLURM and neither; the process group of a world of one."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest
import torch

from megatron.train.initialize import (
    Launch,
    first_host,
    read_launch,
    seed_everything,
    sum_bf16_products_in_fp32,
    tasks_on_node,
)
from megatron.train.main import _run
from tests.unit.train.jobs import TINY

SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "gpu[012-013]",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "2",
}


def test_torchrun() -> None:
    env = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "7",
    }
    assert read_launch(env) == Launch(3, 4, 1, 2, "a", 7, "torchrun")


def test_slurm_without_torchrun() -> None:
    assert read_launch(SLURM) == Launch(5, 7, 1, 3, "gpu012", 23458, "slurm")
    assert read_launch({**SLURM, "MASTER_ADDR": "b", "MASTER_PORT": "9"}).master_addr == "b"


def test_torchrun_inside_slurm_wins() -> None:
    assert read_launch({**SLURM, "RANK": "0", "WORLD_SIZE": "2"}).launcher == "torchrun"


def test_alone() -> None:
    assert read_launch({}) == Launch()
    # A shell inside an allocation is no job step: nobody else was started.
    assert read_launch({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}) == Launch()


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[3-5,9],m1", "n3"),
        ("gpu-a[01,02]-x", "gpu-a01-x"),
        ("r2-n[7]", "r2-n7"),
    ],
)
def test_first_host_of_a_node_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_tasks_per_node() -> None:
    assert [tasks_on_node("4(x2),3", node) for node in range(3)] == [4, 4, 3]


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 is not within a world of 2"),
    ],
)
def test_bad_launch_variables_are_named(env: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_launch(env)


def test_seeds() -> None:
    seed_everything(5)
    first = torch.rand(3)
    seed_everything(5)
    assert torch.equal(first, torch.rand(3))
    with pytest.raises(ValueError, match="--seed -1"):
        seed_everything(-1)


ALONE = """
import torch, torch.distributed as dist
from megatron.train.initialize import Launch, ProcessGroupOptions, initialize_distributed
print(initialize_distributed(Launch(), ProcessGroupOptions()), dist.get_world_size(), dist.get_backend())
tensor = torch.ones(2); dist.all_reduce(tensor); print(tensor.tolist())
"""

ABSENT = """
from megatron.train.errors import one_line_errors
from megatron.train.initialize import Launch, ProcessGroupOptions, initialize_distributed
with one_line_errors():
    initialize_distributed(Launch(1, 2, master_port=PORT), ProcessGroupOptions(timeout_minutes=0.01))
"""


def run_python(source: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return subprocess.run(
        [sys.executable, "-c", source],
        capture_output=True,
        text=True,
        timeout=60,
        env={**env, "PYTHONPATH": "."},
    )


def test_a_world_of_one_needs_no_network() -> None:
    result = run_python(ALONE)
    assert result.stdout.splitlines() == ["cpu 1 gloo", "[1.0, 1.0]"], result.stderr


def test_absent_peers_are_one_line(master_port: int) -> None:
    result = run_python(ABSENT.replace("PORT", str(master_port)))
    assert result.returncode == 2
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("error: rank 1 could not meet the other 1 ranks at 127.0.0.1:"), result.stderr
    assert "Traceback" not in result.stderr


def test_bf16_products_are_summed_in_fp32_where_asked() -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    try:
        matmul.allow_bf16_reduced_precision_reduction = True
        sum_bf16_products_in_fp32()
        assert matmul.allow_bf16_reduced_precision_reduction is False
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before


def test_the_level_of_pythons_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    """--logging-level, before anything is set up."""

    def stop(config: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("megatron.train.main.prepare_environment", stop)
    before = logging.getLogger().level
    try:
        for words, level in (("", before), ("--logging-level 17", 17)):
            with pytest.raises(KeyboardInterrupt):
                _run([*TINY, "--train-iters", "1", *words.split()], None, Launch(0, 1, 0, 1))
            assert logging.getLogger().level == level
    finally:
        logging.getLogger().setLevel(before)
