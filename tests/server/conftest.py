"""Servers and tenants for tests of the service; what they can do is in running.py."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers.postgres_cluster import drop_databases
from tests.support.servers.running import Server, Tenant, environment, key_for
from tests.support.servers.state_samples import BACKENDS, on_backend


@pytest.fixture(scope="session", autouse=True)
def _no_proxy() -> Iterator[None]:
    """The SDK asks the environment's proxy even for 127.0.0.1, unless it is told not to."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("NO_PROXY", "no_proxy"):
            patch.setitem(os.environ, name, environment()[name])
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_databases_left() -> Iterator[None]:
    yield
    drop_databases()


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """The database of the test's stores (see state_samples.py)."""
    with on_backend(request.param):
        yield request.param


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One mock server for all tests that do not disturb it. Each test comes with its own keys."""
    server = Server(tmp_path_factory.mktemp("server")).start()
    yield server
    server.close()


@pytest.fixture
def tenant(server: Server, request: pytest.FixtureRequest) -> Tenant:
    """A tenant that no other test has."""
    return Tenant(server.url, key_for(request.node.nodeid))


@pytest.fixture
def other_tenant(server: Server, request: pytest.FixtureRequest) -> Tenant:
    """A second one."""
    return Tenant(server.url, key_for(f"{request.node.nodeid} other"))


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Makes servers with a data directory of their own, started; a test may kill them and start them again.

    ``own_server(config, gap=1.0)``: the configuration, or None for the mock, and settings of tuned_launch.py.
    """
    servers: list[Server] = []

    def make(config: dict[str, Any] | None = None, **tuning: float) -> Server:
        directory = tmp_path / f"server{len(servers)}"
        directory.mkdir()
        servers.append(Server(directory, config, **tuning))
        return servers[-1].start()

    yield make
    for server in servers:
        server.close()
