"""One small server for all tests here, and a copy of the cookbook whose server files use free ports."""

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.servers.running import Server, environment, free_port, torch_config

MODEL = "random://llama-tiny"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a tiny model, a sampler and processors, in open mode."""
    running = Server(tmp_path_factory.mktemp("documented"), torch_config(MODEL)).start()
    yield running
    assert running.stop() == 0


@pytest.fixture
def client_environment(server: Server, request: pytest.FixtureRequest) -> Mapping[str, str]:
    """The environment of a script that is a client of the server, as a tenant of this test only."""
    key = f"tml-{request.node.name}"
    return {
        **environment(),
        "TWINKLE_SERVER_URL": server.url,
        "TWINKLE_SERVER_TOKEN": key,
        "TINKER_BASE_URL": server.url,
        "TINKER_API_KEY": key,
        "TWINKLE_MODEL": MODEL,
    }


@pytest.fixture
def cookbook(tmp_path: Path) -> tuple[Path, int]:
    """Return a copy of the cookbook in which every server file has the same free port, and that port."""
    copy, port = tmp_path / "cookbook", free_port()
    shutil.copytree(ROOT / "cookbook", copy, ignore=shutil.ignore_patterns("__pycache__"))
    for file in copy.rglob("*.yaml"):
        file.write_text(re.sub(r"port: 8000\b", f"port: {port}", file.read_text()))
    return copy, port


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setitem(os.environ, name, "127.0.0.1,localhost")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, which scripts also load with plain Transformers."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from twinkle import hub

    shape, folder = hub.resolve(MODEL).path, tmp_path_factory.mktemp("model") / "tiny"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(shape)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(shape).save_pretrained(folder)
    return folder
