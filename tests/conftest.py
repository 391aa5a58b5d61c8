"""Settings of all tests."""

import os
import sys
from collections.abc import Iterator

import pytest

# Workers of pytest-xdist share the cores: two threads in each of two workers would wait for each other. torch reads the
# variable when it is imported; tests that are about threads set their number themselves.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module", autouse=True)
def fresh_settings() -> Iterator[None]:
    """Undo the ``initialize`` of scripts and documents that ran in this process: its seed would seed later adapters."""
    yield
    initialization = sys.modules.get("twinkle.infra.initialization")
    if initialization is not None and initialization.current_settings().mode == "local":
        initialization.shutdown()
