"""``python -m twinkle.server`` with the options of the documents."""

import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.servers.forked_servers import fork_server, run_forked
from tests.support.servers.running import Server, environment


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    """A configuration with the mock model, and its server if the test starts one."""
    server = Server(tmp_path)
    yield server
    server.close()


def python_m(*arguments: object) -> "subprocess.CompletedProcess[str]":
    return run_forked([str(argument) for argument in arguments], environment())


def start(server: Server, *options: str) -> None:
    """Start a server with the documented options and wait until it answers."""
    with (server.directory / "server.log").open("ab") as log:
        command = ["--", "--config", str(server.directory / "config.yaml"), *options]
        server.process = fork_server(command, environment(), log)
    assert server.process is not None
    while not server.is_healthy():
        assert server.process.poll() is None, server.log()
        time.sleep(0.02)


def test_row_31_config_without_a_command(own_server: Server) -> None:
    """``--no-wait`` returns when the server serves, and ``stop`` ends it."""
    config = own_server.directory / "config.yaml"
    done = python_m("--config", config, "--no-wait")
    assert done.returncode == 0, done.stderr
    assert own_server.url in done.stdout
    assert httpx.get(f"{own_server.url}/api/v1/healthz", trust_env=False).json() == {"status": "ok"}
    assert python_m("stop", "-c", config).returncode == 0


def test_row_32_server_type(own_server: Server) -> None:
    """The server of either type speaks both protocols."""
    start(own_server, "--server-type", "tinker")
    for path in ("/api/v1/get_server_capabilities", "/api/v1/twinkle/get_server_capabilities"):
        answer = httpx.get(own_server.url + path, headers={"X-API-Key": "tml-anyone"}, trust_env=False)
        assert answer.status_code == 200, path


def test_row_33_config_is_required() -> None:
    done = python_m("--log-level", "INFO")
    assert done.returncode == 2
    assert "--config" in done.stderr


def test_row_34_short_server_type(own_server: Server) -> None:
    start(own_server, "-t", "twinkle")
    done = python_m("-c", own_server.directory / "config.yaml", "-t", "other")
    assert done.returncode == 2
    assert "twinkle" in done.stderr
    assert "tinker" in done.stderr


@pytest.mark.parametrize("level", [None, "INFO", "Error"])
def test_row_35_log_level(own_server: Server, level: str | None) -> None:
    start(own_server, *([] if level is None else ["--log-level", level]))
    levels = set(re.findall(r"\b(DEBUG|INFO|WARNING|ERROR)\b", own_server.log()))
    assert ("INFO" in levels) == (level != "Error")


def test_row_60_module_is_the_command_line() -> None:
    """The commands of ``twinkle-server`` stand beside the form without a command."""
    done = python_m("--help")
    assert done.returncode == 0
    for option in ("--config", "launch", "check-config"):
        assert option in done.stdout
    assert python_m().returncode == 2
