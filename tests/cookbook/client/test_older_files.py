"""Files of cookbook/client at the paths that older documents name."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cookbook.client.client_cookbook import CLIENT, CONFIGURATIONS, FORWARDS
from tests.support.paths import ROOT
from tests.support.servers.running import environment
from twinkle.server.cli import command_line as cli
from twinkle.server.config import ServerConfig

SERVERS = sorted({(CLIENT / name).with_name("server.py").relative_to(CLIENT).as_posix() for name in CONFIGURATIONS})


def without_head(file: Path) -> str:
    """Return the text of a YAML file without the comment at its beginning."""
    return re.sub(r"\A(#.*\n)+", "", file.read_text())


@pytest.mark.parametrize("older", FORWARDS)
def test_a_forward_runs_its_script(older: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same arguments, as the main program; it does nothing else."""
    target = os.path.relpath(CLIENT / FORWARDS[older], (CLIENT / older).parent)
    assert (CLIENT / older).read_text() == (
        f'"""Run {target}. This is its name in older documents."""\n\nimport runpy\nfrom pathlib import Path\n\n'
        f'runpy.run_path(str(Path(__file__).parent / "{target}"), run_name="__main__")\n'
    )
    ran = []
    source = compile((CLIENT / older).read_text(), str(CLIENT / older), "exec")
    monkeypatch.setattr(runpy, "run_path", lambda path, run_name: ran.append((Path(path), run_name)))
    exec(source, {"__file__": str(CLIENT / older)})
    assert ran == [((CLIENT / older).parent / target, "__main__")]
    assert ran[0][0].is_file()


@pytest.mark.parametrize("older", CONFIGURATIONS)
def test_a_configuration_equals_the_current_one(older: str) -> None:
    assert without_head(CLIENT / older) == without_head(CLIENT / CONFIGURATIONS[older])
    assert ServerConfig.from_yaml(CLIENT / older) == ServerConfig.from_yaml(CLIENT / CONFIGURATIONS[older])
    first = (CLIENT / older).read_text().splitlines()[0]
    assert os.path.relpath(CLIENT / CONFIGURATIONS[older], (CLIENT / older).parent) in first


@pytest.mark.parametrize("older", SERVERS)
def test_a_server_script_serves_the_file_beside_it(older: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (CLIENT / older).read_text()
    assert text == (CLIENT / "server" / "transformer" / "server.py").read_text()
    asked: list[list[str]] = []
    monkeypatch.setattr(cli, "main", lambda arguments: asked.append(arguments) or 0)
    monkeypatch.setattr(sys, "argv", ["server.py", "--port", "9000"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(CLIENT / older), run_name="__main__")
    assert ended.value.code == 0
    assert asked == [["launch", "-c", str((CLIENT / older).with_name("server_config.yaml")), "--port", "9000"]]


def test_a_script_beside_folders_called_like_packages() -> None:
    """cookbook/client has folders "twinkle" and "tinker", and Python looks there first. Packages win over folders."""
    done = subprocess.run(
        [sys.executable, str(CLIENT / "server.py"), "--help"], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "usage: twinkle-server launch" in done.stdout


def test_the_megatron_server_has_the_smaller_model() -> None:
    assert "server_config_4b.yaml" in (CLIENT / "server" / "megatron" / "server.py").read_text()


def test_the_configuration_for_tests_from_end_to_end() -> None:
    config = ServerConfig.from_yaml(CLIENT / "server" / "transformer" / "server_config_e2e.yaml")
    assert [one.import_path for one in config.applications] == ["server", "model", "sampler", "processor"]
    assert config.http_options.port == 9000


def test_users_are_told() -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text()
    section = page.split("\n## Files that other documents name\n")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| `(cookbook/[^`]+)` \| (.+) \|$", section, re.MULTILINE))
    for older, current in {**FORWARDS, **CONFIGURATIONS}.items():
        assert rows[f"cookbook/client/{older}"].startswith(f"`cookbook/client/{current}`"), older
    for script in SERVERS:
        assert f"cookbook/client/{script}" in rows
