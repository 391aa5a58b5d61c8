"""Servers and tenants for tests of the service. Their methods are in tests/support/servers/running.py."""

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
    """Bypasses proxies: otherwise the SDK uses the environment's proxy even for 127.0.0.1."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("NO_PROXY", "no_proxy"):
            patch.setitem(os.environ, name, environment()[name])
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_databases_left() -> Iterator[None]:
    """Drops the PostgreSQL databases of the tests at the end."""
    yield
    drop_databases()


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once for each database, sqlite and postgresql, and has stores use it; see state_samples.py."""
    with on_backend(request.param):
        yield request.param


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The mock server that all tests share. Use it if the test does not stop or reconfigure the server."""
    server = Server(tmp_path_factory.mktemp("server")).start()
    yield server
    server.close()


@pytest.fixture
def tenant(server: Server, request: pytest.FixtureRequest) -> Tenant:
    """A tenant of the shared server that no other test uses."""
    return Tenant(server.url, key_for(request.node.nodeid))


@pytest.fixture
def other_tenant(server: Server, request: pytest.FixtureRequest) -> Tenant:
    """A second tenant of the shared server, for tests of isolation."""
    return Tenant(server.url, key_for(f"{request.node.nodeid} other"))


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers with their own data directory, which a test may kill and start again.

    ``own_server(config, gap=1.0)`` takes the configuration, or None for the mock model, and settings of tuning.py.
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
