"""Fixtures for tests with twinkle-kit's client: one server with a tiny model."""

from collections.abc import Iterator

import pytest

from tests.clients.kit.recording import PYTHON
from tests.support.servers.running import Server

MODEL = "random://llama-tiny"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A running server with a tiny model, shared by all tests here. Skips the test if twinkle-kit is not installed."""
    if not PYTHON.exists():
        pytest.skip("twinkle-kit is not installed; `make test-kit` does that")
    model = {"model_id": MODEL, "backend": "transformers", "device": "cpu", "dtype": "fp32", "aliases": ["org/tiny"]}
    applications = [
        {"name": "server", "import_path": "server"},
        {"name": "model", "import_path": "model", "args": model},
        {"name": "sampler", "import_path": "sampler", "args": {"model_id": MODEL, "sampler_type": "torch"}},
        {"name": "processor", "import_path": "processor"},
    ]
    running = Server(tmp_path_factory.mktemp("server"), {"applications": applications}).start()
    yield running
    assert running.stop() == 0
