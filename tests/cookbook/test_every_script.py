"""Every script of the cookbook explains itself, and those for a server name the model that it serves.

All scripts run in one separate process: they import torch, and those for ModelScope modify the tinker SDK.
"""

import ast
import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cookbook.client.client_cookbook import SEEING_MODEL
from tests.support.paths import ROOT
from tests.support.servers.forked_servers import run_forked
from tests.support.servers.running import environment
from twinkle.server.config.server_config import DEFAULT_MODEL

COOKBOOK = ROOT / "cookbook"
SCRIPTS = sorted(path.relative_to(COOKBOOK).as_posix() for path in COOKBOOK.rglob("*.py"))
SELF_HOST = [script for script in SCRIPTS if "/self_host/" in script]
MODELSCOPE = [script for script in SCRIPTS if "/modelscope/" in script]
_OURS = ("TWINKLE_", "TINKER_", "MODELSCOPE_")


@dataclass(frozen=True)
class Ended:
    """How a script ended: exit code or error, what it printed, and the addresses that it connected to."""

    code: int | str | None
    out: str
    connections: list[str]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """How each script ends with ``--help``, and each one for ModelScope without arguments.

    None of our environment variables is set. The keys are command lines below cookbook/.
    """
    folder = tmp_path_factory.mktemp("elsewhere")
    variables = {name: value for name, value in environment().items() if not name.startswith(_OURS)}
    lines = [*(f"{script} --help" for script in SCRIPTS), *(f"{script} -h" for script in MODELSCOPE), *MODELSCOPE]
    commands = json.dumps([f"{COOKBOOK}/{line}".split() for line in lines])
    done = run_forked([Path(__file__).with_name("help_program.py"), commands], variables, folder, timeout=120)
    assert done.returncode == 0, done.stderr
    assert list(folder.iterdir()) == [], "a script wrote files before it read its arguments"
    answers = [Ended(**json.loads(line)) for line in done.stdout.splitlines()]
    return dict(zip(lines, answers, strict=True))


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(script: str, ended: dict[str, Ended]) -> None:
    found = ended[f"{script} --help"]
    assert found.code == 0, found
    assert "usage: " in found.out
    assert found.connections == []


def test_modelscope_scripts_need_a_key_but_not_for_help(ended: dict[str, Ended]) -> None:
    assert len(MODELSCOPE) > 5
    for script in MODELSCOPE:
        assert ended[script].code == "MODELSCOPE_TOKEN: not set; it holds your API key of ModelScope"
        assert ended[f"{script} -h"].code == 0


def model_of(script: Path) -> str | None:
    """Return the model in a script's source: of ``MODEL = "…"`` or ``MODEL = os.environ.get("TWINKLE_MODEL", "…")``."""
    for node in ast.parse(script.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MODEL":
            *_, last = (each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant))
            return str(last)
    return None


def test_scripts_for_a_server_use_its_default_model() -> None:
    models = {script: model_of(COOKBOOK / script) for script in SELF_HOST}
    named = {script: model for script, model in models.items() if model is not None}
    assert len(named) == 12
    for script, model in named.items():
        assert model == (SEEING_MODEL if script.endswith("/multi_modal.py") else DEFAULT_MODEL)
    for script in models.keys() - named.keys():
        assert "This is its name in older documents." in (COOKBOOK / script).read_text()


def test_scripts_say_how_to_start_their_server() -> None:
    """Without a model, because they need none; those with pictures name the model that they use."""
    for script in SELF_HOST:
        lines = (COOKBOOK / script).read_text().splitlines()
        launches = [line.split("#")[0].split() for line in lines if line.startswith("    twinkle-server ")]
        model = ["--model", SEEING_MODEL] if script.endswith("/multi_modal.py") else []
        assert all(launch == ["twinkle-server", "launch", *model] for launch in launches), script
