"""Fixtures for tests of the client: a stub server for each test, and clients that are closed afterwards."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.clients.twinkle.stub_server import StubServer
from twinkle_client import TwinkleClient


@pytest.fixture(autouse=True)
def no_outside(monkeypatch):
    """Removes the machine's server settings from the environment and bypasses proxies."""
    ours = ("TWINKLE_SERVER_URL", "TWINKLE_SERVER_TOKEN", "TWINKLE_WAIT_FOR_LIMITS", "TWINKLE_CONNECT_DEADLINE")
    for name in (*ours, "TINKER_BASE_URL", "TINKER_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")


@pytest.fixture
def stub() -> Iterator[StubServer]:
    """A server that records requests and gives scripted answers; see stub_server.py."""
    server = StubServer()
    yield server
    server.close()


@pytest.fixture
def connect(stub: StubServer) -> Iterator[Callable[..., TwinkleClient]]:
    """Makes clients of the stub server. They send one heartbeat at the start and then practically none."""
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
    """A client of the stub server with default options."""
    return connect()
