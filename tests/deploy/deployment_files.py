"""The deployment files' paths, and checks that the commands, paths, ports and variables in them exist."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.support.paths import ROOT
from twinkle import environment
from twinkle.server.app import make_app
from twinkle.server.cli import command_line as cli
from twinkle.server.config import ServerConfig, load_config

DEPLOY = ROOT / "deploy"
DATA_DIR, CACHE_DIR, CONFIG = "/var/lib/twinkle", "/var/cache/twinkle", "/etc/twinkle/server.yaml"
PORT = 8000
USER = 10001
OWN_VARIABLES = set(re.findall(r"^(\w+) ", environment.__doc__ or "", re.MULTILINE))


def check_command(words: list[str]) -> None:
    """Check that ``twinkle-server`` accepts the arguments; otherwise argparse ends the test."""
    assert Path(words[0]).name == "twinkle-server", words
    cli._parser().parse_args(words[1:])


def commands_in(text: str) -> Iterator[list[str]]:
    """Yield the calls of ``twinkle-server`` in lines and in `code`, without a prefix such as docker exec or sudo."""
    lines = re.sub(r"\\\n", " ", text).splitlines()
    code = [piece for line in lines for piece in re.findall(r"`([^`]+)`", line)]
    for line in (*code, *(re.sub(r" {2,}#.*", "", line) for line in lines if "`" not in line)):
        found = re.search(r"(?:^|[ /])(twinkle-server [a-z-]+(?: .*)?)$", line)
        if found:
            yield shlex.split(found[1])


def paths_of_routes() -> set[str]:
    return {route.path for route in make_app(lambda app: None).routes}  # type: ignore[attr-defined]


def configuration(text: str, directory: Path) -> tuple[ServerConfig, list[str]]:
    """Load a server configuration that is part of another file."""
    (directory / "server.yaml").write_text(text)
    return load_config(directory / "server.yaml")


def documents(file: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(file.read_text()))
