"""The servers of cookbook/client/server: their configurations load, and the mock server starts in both ways."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.cookbook.client.client_cookbook import CLIENT
from tests.support.servers.running import environment
from twinkle.server.config import ServerConfig
from twinkle.server.config.server_config import DEFAULT_MODEL

SERVERS = CLIENT / "server"
DEFAULT_NAMES = (DEFAULT_MODEL, DEFAULT_MODEL.partition("://")[2])  # for the SDK, for twinkle_client


@contextmanager
def listening(command: list[str], log: Path, **variables: str) -> Iterator[str]:
    """Start a server with the command and yield its URL; at the end stop it as Ctrl-C would."""
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env={**environment(), **variables})
    try:
        deadline = time.monotonic() + 60
        while (said := re.search(r"^listening on (\S+)", log.read_text(), re.MULTILINE)) is None:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield said[1]
        process.terminate()
        assert process.wait(120) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def models(url: str) -> list[str]:
    answer = httpx.get(f"{url}/api/v1/get_server_capabilities", headers={"X-API-Key": "tml-any"}, trust_env=False)
    return [model["model_name"] for model in answer.json()["supported_models"]]


@pytest.mark.parametrize("given", [None, "Qwen/Qwen3-4B-Instruct-2507"])
def test_transformer_config(monkeypatch: pytest.MonkeyPatch, given: str | None) -> None:
    monkeypatch.delenv("TWINKLE_MODEL", raising=False)
    if given is not None:
        monkeypatch.setenv("TWINKLE_MODEL", given)
    config = ServerConfig.from_yaml(SERVERS / "transformer" / "server_config.yaml")
    (served,) = config.served_models
    assert served.model.model_id == (given or DEFAULT_MODEL)
    assert served.sampler is not None
    assert served.sampler.sampler_type == "torch"
    assert config.processor is not None


def test_mock_config_knows_the_scripts_model() -> None:
    config = ServerConfig.from_yaml(SERVERS / "mock" / "server_config.yaml")
    assert config.listed_names == ("mock", *DEFAULT_NAMES)


def test_server_script(tmp_path: Path) -> None:
    """The script uses the configuration next to it. The test changes only the port and the data directory."""
    folder = shutil.copytree(SERVERS / "mock", tmp_path / "mock")
    config = folder / "server_config.yaml"
    text = re.sub(r"port: 8000", "port: 0", config.read_text())
    config.write_text(re.sub(r"data_dir: \S+", f"data_dir: {tmp_path / 'data'}", text))
    with listening([sys.executable, str(folder / "server.py")], tmp_path / "log") as url:
        assert {*DEFAULT_NAMES} <= {*models(url)}


def test_run_script(tmp_path: Path) -> None:
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    command = [str(SERVERS / "mock" / "run.sh"), "--port", "0", "--data-dir", str(tmp_path / "data")]
    with listening(command, tmp_path / "log", PATH=path) as url:
        assert {*DEFAULT_NAMES} <= {*models(url)}


@pytest.mark.parametrize("folder", ["megatron", "mock"])
def test_folders_are_alike(folder: str) -> None:
    for name in ("server.py", "run.sh"):
        text = (SERVERS / folder / name).read_text()
        if (folder, name) == ("megatron", "server.py"):  # the smaller of its models
            text = text.replace("server_config_4b.yaml", "server_config.yaml")
        if (folder, name) != ("megatron", "run.sh"):  # it starts a cluster too: tests/documented/test_megatron.py
            assert text == (SERVERS / "transformer" / name).read_text()
    assert os.access(SERVERS / folder / "run.sh", os.X_OK)
