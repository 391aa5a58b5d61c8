"""Every configuration of cookbook/client/server is valid.

Both forms of a server, older and current, load to the same.
"""

import re
from pathlib import Path

import pytest

from tests.cookbook.client.client_cookbook import CLIENT
from twinkle.server.cli import command_line as cli
from twinkle.server.config import ServerConfig

SERVERS = CLIENT / "server"
FILES = sorted(SERVERS.glob("*/*.yaml"))
# folder → the file in the current form that equals its server_config_older.yaml
TWINS = {"megatron": "server_config_4b.yaml", "mock": "server_config.yaml", "transformer": "server_config_ray.yaml"}


def name_of(file: Path) -> str:
    return f"{file.parent.name}/{file.name}"


def check_config(file: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Check a file, which must be valid, and return the notes about it."""
    assert cli.main(["check-config", str(file)]) == 0
    said = capsys.readouterr()
    assert said.out == "ok\n"
    return said.err


def test_both_generations_are_in_every_folder() -> None:
    older = {file.parent.name for file in FILES if file.name == "server_config_older.yaml"}
    assert older == {file.parent.name for file in FILES} == TWINS.keys()


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_check_config(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = check_config(file, capsys)
    is_older = file.name == "server_config_older.yaml"
    assert ("server_type: dropped" in said) == is_older
    assert ("became" in said) == is_older, "files in today's form need no conversion"
    assert "no effect" not in said, "an example has no idle keys"


@pytest.mark.parametrize("folder", TWINS)
def test_older_and_unified_form_are_equal(folder: str) -> None:
    older = SERVERS / folder / "server_config_older.yaml"
    assert ServerConfig.from_yaml(older) == ServerConfig.from_yaml(SERVERS / folder / TWINS[folder])
    assert "server_type" in older.read_text()


def test_forms_of_different_servers_differ() -> None:
    """Shows that the comparison in the test above can fail."""
    older = ServerConfig.from_yaml(SERVERS / "megatron" / "server_config_older.yaml")
    assert older != ServerConfig.from_yaml(SERVERS / "megatron" / "server_config.yaml")


@pytest.mark.parametrize(
    ("name", "gpus", "mesh"),
    [
        ("server_config.yaml", 8, "dp 2 × tp 1 × pp 2, 4 processes"),
        ("server_config_4b.yaml", 3, "dp 2 × tp 1 × pp 1, 2 processes"),
        ("server_config_7b.yaml", 3, "dp 2 × tp 1 × pp 1, 2 processes"),
        ("server_config_older.yaml", 3, "dp 2 × tp 1 × pp 1, 2 processes"),
    ],
)
def test_what_a_cluster_needs_for_megatron(
    name: str, gpus: int, mesh: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a machine without GPUs, check-config says how many the cluster must have, and launch starts nothing."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    said = check_config(SERVERS / "megatron" / name, capsys)
    assert f"applications[1].args: megatron, {mesh}" in said
    assert f"applications: need {gpus} GPUs" in said
    assert "A launch on this machine alone is refused, on a larger Ray cluster it is not" in said


def test_the_readme_names_every_file() -> None:
    linked = re.findall(r"\]\((\w+/\w+\.yaml)\)", (SERVERS / "README.md").read_text())
    assert sorted(linked) == [name_of(file) for file in FILES]
