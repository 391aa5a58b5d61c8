"""``status``: what it shows, and which server it asks."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

import twinkle
from tests.support.servers.forked_servers import run_forked
from tests.support.servers.running import Server, Tenant, environment, mock_config
from twinkle.server.cli import status_command


def status(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run_forked(["status", *arguments], {**environment(), **variables})


def test_it_shows_version_device_memory_disk_queue_and_replicas(server: Server) -> None:
    config = str(server.directory / "config.yaml")
    shown = json.loads(status("-c", config, "--json").stdout)
    assert (shown["url"], shown["version"], shown["runtime"]) == (server.url, twinkle.__version__, "embedded")
    assert 2**20 < shown["memory"]["process_bytes"] < shown["memory"]["machine_bytes"]
    assert shown["disk"]["free_bytes"] < shown["disk"]["total_bytes"]
    assert shown["data_dir"] == str(server.data_dir)
    assert shown["data_dir_bytes"] > 0
    assert shown["queue"].keys() == {"training_ops", "samples"}
    (model,) = shown["models"].values()
    assert (model["device"], model["state"]) == ("cpu", "trains and samples")
    assert model["replicas"] == {"configured": 1, "answering": 1, "silent": []}
    assert model["mesh"] == "mock, 1 process"
    table = status("-c", config).stdout
    for line in (f"version {twinkle.__version__}", "device cpu", "replicas 1 of 1 answering", f"in {server.data_dir};"):
        assert line in " ".join(table.split())


def test_a_server_that_is_down_is_not_replaced_by_another(server: Server, tmp_path: Path) -> None:
    """The file names the port of a server that runs, but with another data directory."""
    file = tmp_path / "down.yaml"
    file.write_text(json.dumps({**server.config, "data_dir": str(tmp_path / "down")}))
    for refused in (status("-c", str(file)), status(TWINKLE_SERVER_CONFIG=str(file))):
        assert (refused.returncode, refused.stdout) == (1, "")
        assert f"no server runs on {tmp_path / 'down'}; another one answers at {server.url}" in refused.stderr
    file.write_text(json.dumps({**server.config, "data_dir": str(tmp_path), "http_options": {"port": 9}}))
    refused = status("-c", str(file))
    assert (refused.returncode, refused.stdout) == (1, "")
    assert f"no server runs on {tmp_path}, and no server answers at http://127.0.0.1:9" in refused.stderr
    assert status("--url", server.url).returncode == 0


def test_behind_a_proxy_it_asks_the_server_itself(own_server: Callable[..., Server]) -> None:
    """The proxy is not there. With its address in the configuration, and no mode, the server needs keys."""
    server = own_server(mock_config(public_url="https://twinkle.example.org"))
    assert json.loads(status("-c", str(server.directory / "config.yaml"), "--json").stdout)["url"] == server.url
    assert "keys is used, because other machines can reach this server (public_url https://twin" in server.log()
    key = (server.data_dir / "generated-key").read_text().strip()
    assert Tenant(server.url, "tml-local").post("client/config", {}).status_code == 401
    assert Tenant(server.url, key).post("client/config", {}).status_code == 200


def test_replicas_that_do_not_answer_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = {"state": "no answer from m#1", "replicas": {"configured": 2, "answering": 1, "silent": ["m#1"]}}
    status_command._print_model("m", numbers)
    assert "1 of 2 answering; no answer from m#1" in capsys.readouterr().out


def test_the_version(server: Server) -> None:
    shown = run_forked(["--version"], environment())
    assert (shown.returncode, shown.stdout) == (0, f"twinkle-server {twinkle.__version__}\n")
    assert httpx.get(f"{server.url}/api/v1/status", trust_env=False).json()["version"] == twinkle.__version__
