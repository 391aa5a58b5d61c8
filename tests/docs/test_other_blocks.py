"""Blocks that are not Python: shell commands and their options exist, configurations are valid, JSON can be read."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.code_blocks import LANGUAGES, PAGES, Block, blocks, blocks_of, ids
from tests.docs.shell_commands import WrongCommandError, check, commands_in
from tests.support.paths import ROOT
from twinkle.server.app import ROUTES
from twinkle.server.config import load_config
from twinkle.server.http.routes import NO_ROUTE

SHELL = blocks("console", "sh")
YAML = blocks("yaml")
HTTP = blocks("http", fragments=True)


def test_every_block_has_a_language_and_every_fragment_a_reason() -> None:
    everything = [block for page in PAGES for block in blocks_of(page)]
    assert len(everything) > 80
    assert [block.name for block in everything if block.language not in LANGUAGES] == []
    fragments = [block for block in everything if block.reason is not None]
    assert [block.name for block in fragments if len(str(block.reason).split()) < 4] == []
    markers = sum(len(re.findall(r"^<!-- fragment:", page.read_text(), re.MULTILINE)) for page in PAGES)
    assert markers == len(fragments), "a marker stands on the line before its block"
    text = sum(page.read_text().count("\n```") for page in PAGES)
    assert text == 2 * len(everything), "a block that does not end, or one with spaces before it"


# --- shell ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", SHELL, ids=ids(SHELL))
def test_commands_exist(block: Block) -> None:
    commands = list(commands_in(block.text, block.language))
    assert commands
    for command in commands:
        check(command)


@pytest.mark.parametrize(
    "command",
    [
        "twinkle-auto --modle x",
        "twinkle-server lunch",
        "twinkle-server launch --modle x",
        ".venv/bin/twinkle-server keys",
        "sudo -u twinkle /opt/bin/twinkle-server nothing",
        "docker exec twinkle twinkle-server nothing",
        "make tset",
        "python cookbook/nothing.py",
        "TWINKLE_MODEL=x python cookbook/transformers/sft_lora.py --nothing 1",
        "python cookbook/client/server/mock/server.py --nothing",
        "torchrun cookbook/transformers/sft_lora.py",
        "pip install '.[nothing]'",
        "pip install twinkle-kit",
        "pytest tests/nothing",
        "curl http://127.0.0.1:8000/api/v1/nothing",
        "docker nothing",
        "nothing --at all",
        "make test && make nothing",
    ],
)
def test_wrong_commands_are_found(command: str) -> None:
    *before, last = commands_in(command, "sh")
    for words in before:
        check(words)
    with pytest.raises(WrongCommandError):
        check(last)


# --- YAML, JSON, HTTP -------------------------------------------------------------------------------------------------

MINIMAL: dict[str, Any] = {
    "runtime": "embedded",
    "applications": [
        {"name": "server", "import_path": "server"},
        {"name": "model", "import_path": "model", "args": {"model_id": "Qwen/Qwen3-8B", "backend": "transformers"}},
        {"name": "sampler", "import_path": "sampler", "args": {"model_id": "Qwen/Qwen3-8B", "sampler_type": "torch"}},
    ],
}


def whole(found: Any) -> dict[str, Any]:
    """Return a configuration that contains a block: sections, one application, or the arguments of the model."""
    if isinstance(found, list):
        others = [one for one in MINIMAL["applications"] if one["name"] not in {each["name"] for each in found}]
        return {**MINIMAL, "runtime": "ray", "applications": [*others, *found]}
    if found.keys() == {"args"}:
        return whole([{**MINIMAL["applications"][1], **found}])
    return {**MINIMAL, **found}


@pytest.mark.parametrize("block", YAML, ids=ids(YAML))
def test_configurations_are_valid(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in re.findall(r"\$\{oc\.env:(\w+)\}", block.text):
        monkeypatch.setenv(variable, "value")
    file = tmp_path / "server.yaml"
    file.write_text(yaml.safe_dump(whole(yaml.safe_load(block.text))))
    config, _ = load_config(file)
    assert config.served_models


def test_an_alias_is_not_the_name_of_another_model() -> None:
    """A client that asked for that model would train another one and not notice."""
    for block in YAML:
        for one in whole(yaml.safe_load(block.text))["applications"]:
            assert [alias for alias in one.get("args", {}).get("aliases", ()) if "/" in alias] == [], block.name


def test_json_can_be_read() -> None:
    for block in blocks("json"):
        json.loads(block.text)


@pytest.mark.parametrize("block", HTTP, ids=ids(HTTP))
def test_requests_have_routes_and_bodies(block: Block) -> None:
    for method, path in re.findall(r"^(GET|POST|PUT|DELETE) (\S+)$", block.text, re.MULTILINE):
        assert ROUTES.find(method, path)[0] is not NO_ROUTE, path
    if block.reason is None:
        bodies = re.findall(r"^\{.*?\}$", block.text, re.MULTILINE | re.DOTALL)
        assert bodies
        for body in bodies:
            json.loads(body)


# --- links ------------------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"`", "", heading).lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files_and_headings(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        if "://" not in link and not link.startswith("mailto:"):
            file, _, anchor = link.partition("#")
            target = page.parent / file if file else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link
