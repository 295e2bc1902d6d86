"""tests/pool.py itself: results, failures, deaths and hangs, and what one call may leave to the next."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool, RankError, RankTimeoutError, free_port, run_ranks


def sum_of_ranks(rank: int, world_size: int, size: int) -> tuple[int, torch.Tensor]:
    tensor = torch.full((size,), float(rank))
    dist.all_reduce(tensor)
    return dist.get_world_size(), tensor


def fail_on_one(rank: int, world_size: int, failing: int) -> None:
    if rank == failing:
        raise ValueError("the reason")
    dist.barrier()


def die_on_one(rank: int, world_size: int, failing: int) -> None:
    if rank == failing:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)


def hang_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        time.sleep(600)


def leave_a_mess(rank: int, world_size: int) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)


def process_state(rank: int, world_size: int) -> tuple[Any, ...]:
    return torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(), os.getpid()


def mutate(rank: int, world_size: int, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.add_(rank)


def patch_torch() -> None:
    torch.patched_by_pool = True  # type: ignore[attr-defined]


def is_patched(rank: int, world_size: int) -> bool:
    return hasattr(torch, "patched_by_pool")


def broken_initializer() -> None:
    raise OSError("cannot patch")


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_results_by_rank(world_size: int) -> None:
    for result_world_size, tensor in run_ranks(sum_of_ranks, world_size, 5):
        assert result_world_size == world_size
        assert torch.equal(tensor, torch.full((5,), float(sum(range(world_size)))))


def test_call_on_warm_workers_is_fast() -> None:
    run_ranks(sum_of_ranks, 2, 1)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        run_ranks(sum_of_ranks, 2, 1)
        times.append(time.perf_counter() - start)
    assert min(times) < 1, times  # 0.03 on an idle machine


def test_exception_names_rank_and_releases_peers() -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="(?s)rank 2 failed.*ValueError: the reason") as caught:
        run_ranks(fail_on_one, 3, 2)
    assert caught.value.rank == 2
    assert time.monotonic() - start < 30
    assert len(run_ranks(sum_of_ranks, 3, 1)) == 3


def test_dead_worker_is_noticed_at_once() -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="worker died with exit code -9"):
        run_ranks(die_on_one, 2, 1)
    assert time.monotonic() - start < 25  # die_on_one's peer sleeps for 30
    assert len(run_ranks(sum_of_ranks, 2, 1)) == 2


def wait_until_gone(process: int) -> None:
    deadline = time.monotonic() + 30
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.kill(process, 0)
            time.sleep(0.01)


def test_worker_killed_between_calls_is_replaced() -> None:
    pool = Pool()
    pool.run(sum_of_ranks, 1, 1)
    (worker,) = pool.worker_ids()
    assert worker is not None
    os.kill(worker, signal.SIGKILL)
    wait_until_gone(worker)
    assert len(pool.run(sum_of_ranks, 1, 1)) == 1
    assert pool.worker_ids() != [worker]
    pool.close()


def test_hang_shows_stack_of_the_hanging_rank() -> None:
    with pytest.raises(RankTimeoutError, match="in hang_on_one") as caught:
        run_ranks(hang_on_one, 2, timeout=1)
    assert caught.value.rank == 1
    assert len(run_ranks(sum_of_ranks, 2, 1)) == 2


def test_nothing_left_to_the_next_call() -> None:
    run_ranks(leave_a_mess, 2)
    for dtype, grad_enabled, threads, _ in run_ranks(process_state, 2):
        assert (dtype, grad_enabled, threads) == (torch.float32, True, 1)


def test_workers_stay_warm() -> None:
    first = [state[-1] for state in run_ranks(process_state, 2)]
    assert [state[-1] for state in run_ranks(process_state, 2)] == first


def test_arguments_are_copies() -> None:
    tensor = torch.zeros(3)
    results = run_ranks(mutate, 2, tensor)
    assert [float(result[0]) for result in results] == [0.0, 1.0]
    assert torch.equal(tensor, torch.zeros(3))


def test_pool_of_its_own_is_patched_and_the_shared_one_is_not() -> None:
    pool = Pool(initializer=patch_torch)
    assert pool.run(is_patched, 2) == [True, True]
    assert run_ranks(is_patched, 2) == [False, False]
    pool.close()


def test_failing_initializer_is_reported() -> None:
    with pytest.raises(RankError, match="OSError: cannot patch"):
        Pool(initializer=broken_initializer).run(is_patched, 1)


def test_bad_use_is_refused() -> None:
    with pytest.raises(ValueError, match="top-level function"):
        run_ranks(lambda rank, world_size: None, 2)
    with pytest.raises(ValueError, match="world_size 9"):
        run_ranks(is_patched, 9)


def test_free_port_is_usable() -> None:
    assert 1024 <= free_port() <= 65535


KEPT: list[torch.nn.Module] = []


class Kept(torch.nn.Module):
    """A module that a test leaves behind."""


def keep_a_module(rank: int, world_size: int, keep: bool) -> None:
    one = Kept()
    if keep:
        KEPT.append(one)


def test_a_module_that_outlives_its_call_is_an_error() -> None:
    run_ranks(keep_a_module, 2, False)
    with pytest.raises(RankError, match="modules outlive the call that made them, Kept"):
        run_ranks(keep_a_module, 2, True)
    run_ranks(keep_a_module, 2, False)  # which is said once
