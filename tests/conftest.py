"""Settings of all tests."""

import os
import socket
import sys
from collections.abc import Iterator

import pytest

# Workers of pytest-xdist share the cores: two threads in each of two workers would wait for each other. torch reads the
# variable when it is imported; tests that are about threads set their number themselves.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Let pytest-rerunfailures send at once from pytest-xdist's workers.

    It sends two small messages for each test. Otherwise the second waits 40 ms until the first is acknowledged.
    """
    connection = getattr(getattr(config, "failures_db", None), "sock", None)
    if connection is not None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


@pytest.fixture(scope="module", autouse=True)
def fresh_settings() -> Iterator[None]:
    """Undo the ``initialize`` of scripts and documents that ran in this process: its seed would seed later adapters."""
    yield
    initialization = sys.modules.get("twinkle.infra.initialization")
    if initialization is not None and initialization.current_settings().mode == "local":
        initialization.shutdown()
