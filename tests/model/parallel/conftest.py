"""Pools of processes, each started when a test first asks for it."""

from collections.abc import Iterator

import pytest
import torch

from tests.model.parallel.process_pool import ProcessPool


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def two() -> Iterator[ProcessPool]:
    pool = ProcessPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def four() -> Iterator[ProcessPool]:
    pool = ProcessPool(4)
    yield pool
    pool.close()
