"""The command line: start in the background, key management, and error messages."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.servers.forked_servers import run_forked
from tests.support.servers.running import Server, environment


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_forked(arguments, environment())


@pytest.fixture
def config(tmp_path: Path) -> Path:
    Server(tmp_path)  # writes config.yaml
    return tmp_path / "config.yaml"


def end(pid: int) -> None:
    os.kill(pid, signal.SIGTERM)
    for _ in range(200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} did not end")


def test_no_wait_returns_when_the_server_serves(config: Path) -> None:
    started = run("launch", "-c", str(config), "--port", "0", "--no-wait")
    found = re.search(r"serving on (http://\S+) as process (\d+)", started.stdout)
    assert found, started
    try:
        status = run("status", "--url", found[1])
        assert "merge_ratio" in status.stdout, status
        assert re.search(r"training +sampling\n +tokens +0 +0\n +tokens/s +0.0 +0.0\n", status.stdout), status
        again = run("launch", "-c", str(config), "--port", found[1].rpartition(":")[2], "--no-wait")
        assert again.returncode == 1
        assert "cannot listen" in again.stderr
    finally:
        end(int(found[2]))


def test_keys_are_shown_once_listed_without_and_revoked(tmp_path: Path) -> None:
    where = ("--data-dir", str(tmp_path))
    created = run("keys", "create", "--name", "first", *where)
    key = created.stdout.strip()
    assert re.fullmatch(r"tml-[A-Za-z0-9_-]{43}", key)
    listed = run("keys", "list", *where).stdout
    assert "first" in listed
    assert "active" in listed
    assert key not in listed
    key_id = listed.splitlines()[1].split()[0]
    assert run("keys", "revoke", key_id, *where).returncode == 0
    assert "revoked" in run("keys", "list", *where).stdout
    gone = run("keys", "revoke", key_id, *where)
    assert gone.returncode == 1
    assert key_id in gone.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ((), 2, "COMMAND"),
        (("launch", "--port", "eighty"), 2, "--port"),
        (("--port", "8000"), 2, "-c/--config FILE: required without a COMMAND"),
        (("--config", "/nowhere.yaml", "-t", "tinker", "--log-level", "INFO"), 1, "/nowhere.yaml"),
        (("launch", "-c", "/nowhere.yaml"), 1, "/nowhere.yaml"),
        (("check-config", "/nowhere.yaml"), 2, "error: configuration file not found: /nowhere.yaml"),
        (("status", "--url", "http://127.0.0.1:9"), 1, "no server answers"),
    ],
)
def test_wrong_use_is_told_in_one_line(arguments: tuple[str, ...], code: int, text: str) -> None:
    told = run(*arguments)
    assert told.returncode == code
    assert text in told.stderr
    assert "Traceback" not in told.stderr


def test_check_config_and_print_config(config: Path) -> None:
    assert run("check-config", str(config)).stdout == "ok\n"
    printed = run("print-config", "-c", str(config)).stdout
    assert "max_queued_ops_per_tenant" in printed
    bad = config.with_name("bad.yaml")
    bad.write_text("limits: {max_rnak: 3}")
    told = run("check-config", str(bad))
    assert told.returncode == 2
    assert told.stderr.startswith("error: invalid configuration\n")
    assert "max_rank" in told.stderr
