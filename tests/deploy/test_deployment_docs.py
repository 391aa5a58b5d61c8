"""The commands and settings in the documentation of deployments are valid."""

import re

import pytest

from tests.deploy.deployment_files import DEPLOY, ROOT, check_command, commands_in, paths_of_routes
from twinkle.server.config import LimitsConfig, ServerConfig

PAGES = [
    ROOT / "docs" / "deployment.md",
    ROOT / "docs" / "releases.md",
    ROOT / "cookbook" / "client" / "server" / "README.md",
    *sorted(file for file in DEPLOY.rglob("*") if file.is_file()),
]
TEXT = PAGES[0].read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_understood(page) -> None:
    for command in commands_in(page.read_text()):
        check_command(command)


def test_commands_are_found() -> None:
    found = [command[1] for command in commands_in(TEXT)]
    assert {"keys", "check-config", "status"} <= set(found)
    assert len(found) >= 7
    with pytest.raises(SystemExit):
        check_command(["twinkle-server", "lunch"])


def test_files_exist() -> None:
    named = set(re.findall(r"`(deploy/[\w./-]+)`|(deploy/systemd/\S+)", TEXT))
    files = {one or other for one, other in named}
    assert len(files) >= 5
    for file in files:
        assert (ROOT / file.rstrip("`")).exists(), file


def test_keys_of_the_configuration_exist() -> None:
    limits = set(re.findall(r"limits\.(\w+)", TEXT))
    assert limits
    assert limits <= LimitsConfig.model_fields.keys()
    assert {"public_url", "allowed_dirs", "persistence", "data_dir"} <= ServerConfig.model_fields.keys()


def test_routes_exist() -> None:
    routes = set(re.findall(r"/api/v1/\w+", TEXT))
    assert routes
    assert routes <= paths_of_routes()


def test_make_targets_exist() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = set(re.findall(r"`make ([a-z -]+)`", TEXT + (ROOT / "docs" / "releases.md").read_text()))
    assert {one for names in named for one in names.split()} <= set(targets)
