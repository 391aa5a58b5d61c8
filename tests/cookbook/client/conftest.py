"""Fixtures that run the scripts of cookbook/client against a tiny model.

They run in this process, so that imports happen once.
"""

import os
import runpy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.cookbook.client.client_cookbook import CLIENT, MODEL, SEEING_MODEL
from tests.support.servers.running import Server, torch_config


@pytest.fixture(scope="session", autouse=True)
def _no_proxy() -> Iterator[None]:
    """Bypasses proxies for 127.0.0.1."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("NO_PROXY", "no_proxy"):
            patch.setitem(os.environ, name, "127.0.0.1,localhost")
        yield


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a tiny model that reads text and one that sees, shared by all tests here."""
    config, seeing = torch_config(MODEL), torch_config(SEEING_MODEL)
    _, model, sampler, _ = seeing["applications"]
    config["applications"] += [{**model, "name": "seeing-model"}, {**sampler, "name": "seeing-sampler"}]
    running = Server(tmp_path_factory.mktemp("server"), config).start()
    yield running
    assert running.stop() == 0


@pytest.fixture
def run(
    server: Server, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Callable[..., dict[str, Any]]]:
    """``run(script, *arguments)`` runs a script as a tenant that no other test uses.

    It returns the script's global names.
    """
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
