"""A server with a tiny model; the scripts of cookbook/client run against it in this process: imports happen once."""

import os
import runpy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.cookbook.client.client_cookbook import CLIENT, MODEL
from tests.support.servers.running import Server


@pytest.fixture(scope="session", autouse=True)
def _no_proxy() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("NO_PROXY", "no_proxy"):
            patch.setitem(os.environ, name, "127.0.0.1,localhost")
        yield


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = {"model_id": MODEL, "backend": "transformers", "device": "cpu", "dtype": "fp32"}
    applications = [
        {"name": "server", "import_path": "server"},
        {"name": "model", "import_path": "model", "args": model},
        {"name": "sampler", "import_path": "sampler", "args": {"model_id": MODEL, "sampler_type": "torch"}},
        {"name": "processor", "import_path": "processor"},
    ]
    running = Server(tmp_path_factory.mktemp("server"), {"applications": applications}).start()
    yield running
    assert running.stop() == 0


@pytest.fixture
def run(
    server: Server, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Callable[..., dict[str, Any]]]:
    """Runs a script as a tenant of this test's own; returns its names."""
    monkeypatch.setenv("TWINKLE_SERVER_URL", server.url)
    monkeypatch.setenv("TWINKLE_SERVER_TOKEN", f"tml-{request.node.name}")
    monkeypatch.setenv("TWINKLE_MODEL", MODEL)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def run(script: str, *arguments: object) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        return runpy.run_path(str(CLIENT / script), run_name="__main__")

    yield run
    torch.set_num_threads(threads)
