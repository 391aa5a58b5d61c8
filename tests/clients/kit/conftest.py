"""Fixtures for tests with twinkle-kit's client: one server with a tiny model."""

from collections.abc import Iterator

import pytest

from tests.clients.kit.recording import PYTHON
from tests.support.servers.running import Server, torch_config

MODEL = "random://llama-tiny"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A running server with a tiny model, shared by all tests here. Skips the test if twinkle-kit is not installed."""
    if not PYTHON.exists():
        pytest.skip("twinkle-kit is not installed; `make test-kit` does that")
    running = Server(tmp_path_factory.mktemp("server"), torch_config(MODEL, aliases=["org/tiny"])).start()
    yield running
    assert running.stop() == 0
