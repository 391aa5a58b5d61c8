"""A stub server for each test, and clients of it that are closed afterwards."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.clients.twinkle.stub_server import StubServer
from twinkle_client import TwinkleClient


@pytest.fixture(autouse=True)
def no_outside(monkeypatch):
    """Neither proxies nor a server of the machine's."""
    for name in ("TWINKLE_SERVER_URL", "TWINKLE_SERVER_TOKEN", "TINKER_BASE_URL", "TINKER_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")


@pytest.fixture
def stub() -> Iterator[StubServer]:
    server = StubServer()
    yield server
    server.close()


@pytest.fixture
def connect(stub: StubServer) -> Iterator[Callable[..., TwinkleClient]]:
    """Clients with a heartbeat that comes once and then hardly ever."""
    clients = []

    def make(**options: Any) -> TwinkleClient:
        settings = {"session_heartbeat_interval": 1000, "retry_deadline": 5.0, **options}
        clients.append(TwinkleClient(stub.url, "my-token", **settings))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def client(connect: Callable[..., TwinkleClient]) -> TwinkleClient:
    return connect()
