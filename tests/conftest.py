"""pytest settings shared by all tests: `--full`, the worker pools' end, one thread a process."""

from __future__ import annotations

import os

# Before torch is imported anywhere: ranks share two cores, and results must not depend on the thread count.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from tests.pool import close_all_pools, free_port


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full", action="store_true", help="also run the tests marked `full` (whole grids, slow cells)"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    # Deselected rather than skipped: a skip costs a millisecond each, and there are thousands.
    config.hook.pytest_deselected(items=[item for item in items if "full" in item.keywords])
    items[:] = [item for item in items if "full" not in item.keywords]


def pytest_sessionfinish() -> None:
    close_all_pools()


@pytest.fixture
def master_port() -> int:
    """A free port for a launcher started by the test."""
    return free_port()
