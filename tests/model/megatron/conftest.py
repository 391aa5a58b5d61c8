"""Pools of processes for tests with megatron-core. A pool starts when a test first uses it, and serves later tests."""

import importlib.util
from collections.abc import Iterator

import pytest

from tests.model.parallel.process_pool import ProcessPool

# The default environment has no megatron-core, and test files here import it.
collect_ignore_glob = [] if importlib.util.find_spec("megatron") else ["test_*.py", "*/test_*.py"]

_PROGRAMS = tuple(
    f"tests.model.megatron.{name}_programs" for name in ("stage", "trainer", "failure", "experts", "full", "library")
)


@pytest.fixture(scope="session")
def two() -> Iterator[ProcessPool]:
    """A pool of two processes."""
    pool = ProcessPool(2, _PROGRAMS)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def four() -> Iterator[ProcessPool]:
    """A pool of four processes."""
    pool = ProcessPool(4, _PROGRAMS)
    yield pool
    pool.close()
