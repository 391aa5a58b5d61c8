"""Fixtures with pools of processes. Each pool starts when a test first uses it, and serves all later tests."""

from collections.abc import Iterator

import pytest
import torch

from tests.model.parallel.process_pool import ProcessPool


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Runs torch on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def two() -> Iterator[ProcessPool]:
    """A pool of two processes."""
    pool = ProcessPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def four() -> Iterator[ProcessPool]:
    """A pool of four processes."""
    pool = ProcessPool(4)
    yield pool
    pool.close()
