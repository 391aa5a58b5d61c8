"""The image: the Dockerfile copies files that exist and are not ignored, and its commands are valid."""

import fnmatch
import json
import re
import tomllib

import pytest

from tests.deploy.deployment_files import (
    CACHE_DIR,
    CONFIG,
    DATA_DIR,
    DEPLOY,
    OWN_VARIABLES,
    PORT,
    ROOT,
    USER,
    check_command,
    paths_of_routes,
)
from twinkle.server.config import load_config

TEXT = re.sub(r"\\\n\s*", " ", (ROOT / "Dockerfile").read_text())
INSTRUCTIONS = [tuple(line.split(None, 1)) for line in TEXT.splitlines() if line and not line.startswith("#")]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions(name: str) -> list[str]:
    return [rest for word, rest in INSTRUCTIONS if word == name]


def from_here() -> list[tuple[str, str]]:
    """Return (source, target) of each COPY from the build context."""
    copies = [rest.split() for rest in instructions("COPY") if not rest.startswith("--from")]
    return [(source, words[-1]) for words in copies for source in words[:-1]]


def is_ignored(path: str) -> bool:
    """Return whether docker ignores the path.

    The last .dockerignore line that matches it or a parent directory decides.
    """
    ignored = False
    above = ["/".join(path.split("/")[: n + 1]) for n in range(path.count("/") + 1)]
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        if pattern and not line.startswith("#") and any(fnmatch.fnmatch(one, pattern) for one in above):
            ignored = not line.startswith("!")
    return ignored


@pytest.mark.parametrize("source", [source for source, _ in from_here()])
def test_what_is_copied_is_there_and_sent(source: str) -> None:
    assert (ROOT / source).exists()
    assert not is_ignored(source)


def test_nothing_else_is_sent() -> None:
    sent = {path.name for path in ROOT.iterdir() if not is_ignored(path.name)}
    assert sent <= {source.split("/")[0] for source, _ in from_here()}
    assert is_ignored(".git")
    assert is_ignored("tests/deploy/test_container_files.py")


def test_the_package_can_be_built_from_what_is_copied() -> None:
    sources = {source for source, _ in from_here()}
    assert {"pyproject.toml", "client", "src", PROJECT["readme"], *PROJECT["license-files"]} <= sources


def test_extras_exist() -> None:
    (install,) = [rest for rest in instructions("RUN") if "/src[" in rest]
    named = re.search(r"/src\[([\w,${}]+)\]", install)
    assert named
    (default,) = [rest.partition("=")[2] for rest in instructions("ARG") if rest.startswith("EXTRAS=")]
    extras = [extra for extra in (*named[1].split(","), *default.split(",")) if not extra.startswith("$")]
    assert extras
    assert set(extras) <= PROJECT["optional-dependencies"].keys()


def test_torch_is_in_our_range() -> None:
    (torch,) = [rest.partition("=")[2] for rest in instructions("ARG") if rest.startswith("TORCH=")]
    assert torch in PROJECT["optional-dependencies"]["transformers"]


def test_both_stages_know_their_arguments() -> None:
    """An ARG before FROM, or in another stage, is empty unless it is declared again."""
    for stage in TEXT.split("\nFROM ")[1:]:
        used = set(re.findall(r"\$\{(\w+)\}", stage.partition("\n")[2]))
        assert used <= set(re.findall(r"^ARG (\w+)", stage, re.MULTILINE))


def test_the_last_stage_runs_the_server_as_nobody_special() -> None:
    assert instructions("USER") == [f"{USER}:{USER}"]
    (entry,), (command,) = instructions("ENTRYPOINT"), instructions("CMD")
    check_command([*json.loads(entry), *json.loads(command)])
    assert json.loads(command)[-1] == CONFIG
    assert ("deploy/server.yaml", CONFIG) in from_here()
    assert json.loads(instructions("VOLUME")[0]) == [DATA_DIR, CACHE_DIR]
    assert instructions("EXPOSE") == [str(PORT)]
    assert instructions("STOPSIGNAL") == ["SIGTERM"]


def test_the_health_check_asks_a_route_that_exists() -> None:
    (check,) = instructions("HEALTHCHECK")
    url = re.search(rf"http://127\.0\.0\.1:{PORT}([\w/]+)'", check)
    assert url
    assert url[1] in paths_of_routes()


def test_variables_exist() -> None:
    names = {name for rest in instructions("ENV") for name in re.findall(r"(TWINKLE_\w+)=", rest)}
    asked_for = set(re.findall(r"oc\.env:(\w+)", (DEPLOY / "server.yaml").read_text()))
    assert names
    assert names <= OWN_VARIABLES | asked_for


def test_the_configuration_of_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINKLE_HOST", "0.0.0.0")  # the image sets it
    config, notes = load_config(DEPLOY / "server.yaml")
    assert notes == []
    assert (config.http_options.host, config.http_options.port) == ("0.0.0.0", PORT)
    assert str(config.data_dir) == DATA_DIR
    assert config.auth.mode == "keys"
    monkeypatch.delenv("TWINKLE_HOST")
    assert load_config(DEPLOY / "server.yaml")[0].http_options.is_loopback
