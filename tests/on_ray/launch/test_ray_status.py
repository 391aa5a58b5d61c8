"""A server on Ray behind a proxy: what ``status`` and the health checks say while a replica is missing."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import twinkle

if not twinkle.exists("ray"):
    pytest.skip("Ray is not installed; `make test-ray` does that", allow_module_level=True)
os.environ["TWINKLE_TEST_RUNTIME"] = "ray"

from tests.on_ray.ray_processes import descendants
from tests.support.servers.running import Server, Tenant, environment, mock_config

pytestmark = pytest.mark.ray

_BACK_SECONDS = 120.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with two replicas of the mock model. Its ``public_url`` leads nowhere."""
    config = mock_config(runtime="ray", public_url="https://twinkle.example.org")
    config["applications"][1]["deployments"] = [{"num_replicas": 2}]
    running = Server(tmp_path_factory.mktemp("status"), config).start()
    yield running
    assert running.stop() == 0


def status(server: Server, *options: str) -> str:
    command = server.command("status", "-c", str(server.directory / "config.yaml"), *options)
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def health(server: Server, check: str) -> httpx.Response:
    return httpx.get(f"{server.url}/api/v1/healthz/{check}", timeout=30, trust_env=False)


def replicas_of(shown: dict[str, Any]) -> dict[str, Any]:
    (model,) = shown["models"].values()
    found: dict[str, Any] = model["replicas"]
    return found


def test_behind_a_proxy_it_asks_the_server_itself_and_needs_a_key(server: Server) -> None:
    shown = json.loads(status(server, "--json"))
    assert (shown["url"], shown["runtime"]) == (server.url, "ray")
    assert replicas_of(shown) == {"configured": 2, "answering": 2, "silent": []}
    assert "listening on https://twinkle.example.org" in server.log()
    key = (server.data_dir / "generated-key").read_text().strip()
    assert Tenant(server.url, "tml-local").post("client/config", {}).status_code == 401
    assert Tenant(server.url, key).post("client/config", {}).status_code == 200


def test_a_killed_replica_is_named_until_it_is_back(server: Server) -> None:
    assert health(server, "ready").status_code == health(server, "deep").status_code == 200
    log = Path(server.data_dir / "logs/model-1.log")
    (before,) = descendants(server, "ServeReplica:model:model-1")
    assert f"model-1 starts as process {before} on 127.0.0.1" in log.read_text()
    os.kill(before, signal.SIGKILL)
    deadline = time.monotonic() + _BACK_SECONDS
    missing = health(server, "deep")
    while missing.status_code == 200:
        assert time.monotonic() < deadline
        missing = health(server, "deep")
    assert missing.status_code == 503
    assert "model-1" in missing.text
    while health(server, "ready").status_code != 200 or health(server, "deep").status_code != 200:
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)
    assert "replicas 2 of 2 answering" in " ".join(status(server).split())
    (after,) = descendants(server, "ServeReplica:model:model-1")
    assert after != before
    assert f"model-1 starts as process {after} on 127.0.0.1" in log.read_text()
