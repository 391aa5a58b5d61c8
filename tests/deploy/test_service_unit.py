"""The systemd unit: its commands, directories and limits match the server."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy.deployment_files import CACHE_DIR, CONFIG, DATA_DIR, DEPLOY, OWN_VARIABLES, check_command
from twinkle.server.runtime import embedded

UNIT = DEPLOY / "systemd" / "twinkle-server.service"


def settings() -> dict[str, list[str]]:
    """Return all values of each key. In this unit no two sections use the same key."""
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text().splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


def test_commands_are_understood() -> None:
    unit = settings()
    for command in (*unit["ExecStartPre"], *unit["ExecStart"]):
        words = command.split()
        assert words[0] == "/opt/twinkle/bin/twinkle-server"
        check_command(words)
        assert CONFIG in words
    assert unit["ExecStart"][0].endswith(f"--data-dir {DATA_DIR}")


def test_directories_belong_to_it() -> None:
    unit = settings()
    assert [f"/var/lib/{unit['StateDirectory'][0]}"] == unit["WorkingDirectory"] == [DATA_DIR]
    assert f"/var/cache/{unit['CacheDirectory'][0]}" == CACHE_DIR
    assert unit["ProtectSystem"] == ["strict"], "so only those two can be written"
    users = (DEPLOY / "systemd" / "twinkle.sysusers.conf").read_text().splitlines()
    (user,) = [line.split() for line in users if line.startswith("u ")]
    assert unit["User"] == [user[1]]
    assert user[-1] == DATA_DIR


def test_it_is_given_time_to_drain_and_files() -> None:
    unit = settings()
    assert unit["KillSignal"] == ["SIGTERM"]
    assert int(unit["TimeoutStopSec"][0]) >= 60
    assert int(unit["LimitNOFILE"][0]) == embedded._OPEN_FILES


def test_variables_exist() -> None:
    names = {one.partition("=")[0] for value in settings()["Environment"] for one in value.split()}
    assert {name for name in names if name.startswith("TWINKLE_")} <= OWN_VARIABLES
    assert names - OWN_VARIABLES == {"HF_HOME"}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_understands_it(tmp_path: Path) -> None:
    """systemd accepts the unit, apart from the programs, which are not installed here."""
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/twinkle/bin/twinkle-server", "/bin/true"))
    checked = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60)
    assert "twinkle-server.service" not in checked.stderr, checked.stderr
