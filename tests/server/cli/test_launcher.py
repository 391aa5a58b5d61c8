"""launch_server and ServerLauncher: what they serve, also with a minimal or empty configuration."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from tests.support.servers.running import environment
from twinkle.server import ServerLauncher, launch_server
from twinkle.server.cli import command_line as cli
from twinkle.server.cli import launch
from twinkle.server.config import DEFAULT_MODEL, ServerConfig, default_config
from twinkle.server.runtime.process import announcement
from twinkle.utils.progress import NO_BARS


@pytest.fixture
def served(monkeypatch) -> list[tuple[ServerConfig, Sequence[str]]]:
    """Collects the configurations that would have been served."""
    calls: list[tuple[ServerConfig, Sequence[str]]] = []
    monkeypatch.setattr(launch, "run_server", lambda config, notes=(): calls.append((config, notes)))
    return calls


def test_the_configuration_comes_first(served, tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("http_options: {port: 1234}\nmax: {}")
    config = default_config("m", backend="mock")
    launch_server(config, config_path=file)
    assert served == [(config, ())]
    ServerLauncher(config, ray_namespace="ours").launch()
    assert served[1][0].ray_namespace == "ours"


def test_a_file_and_the_demo(served, tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("server_type: tinker\nray_namespace: theirs")
    launch_server(config_path=str(file), ray_namespace="ours")
    config, notes = served[0]
    assert config.ray_namespace == "ours"
    assert "server_type: dropped, one server speaks both protocols" in notes
    launch_server()
    assert served[1][0].served_models[0].name == DEFAULT_MODEL


@pytest.mark.parametrize("wrong", [{"runtime": "embedded"}, "server.yaml", Path("server.yaml")])
def test_only_a_server_config_is_one(served, wrong: object) -> None:
    with pytest.raises(TypeError, match=r"ServerConfig.*config_path="):
        launch_server(wrong)  # type: ignore[arg-type]
    assert served == []


@pytest.mark.parametrize("arguments", [[], ["--no-wait"]])
def test_without_applications_there_is_nothing_to_serve(tmp_path: Path, arguments, capsys) -> None:
    file = tmp_path / "empty.yaml"
    file.write_text("")
    assert cli.main(["launch", "-c", str(file), *arguments]) == 1
    said = capsys.readouterr()
    assert "nothing to serve: the configuration has no applications" in said.err
    assert said.out == ""
    launch_server(ServerConfig())


FIRST_LINE = """
import sys
import twinkle.server.cli

class NoFurther:
    def find_spec(self, name, path=None, target=None):
        if name == "twinkle.server.cli.command_line":
            raise ImportError("this far")

sys.meta_path.insert(0, NoFurther())
try:
    twinkle.server.cli.main(sys.argv[1:])
except ImportError as error:
    print(error, *sorted({"fastapi", "pydantic", "sqlalchemy", "torch", "transformers"} & set(sys.modules)))
"""


@pytest.mark.parametrize(
    ("arguments", "first"),
    [
        (["launch"], r"twinkle-server starts as process \d+: loading modules\n"),
        (["--config", "a.yaml"], r"twinkle-server starts as process \d+: loading modules\n"),
        (["launch", "--log-format", "json"], r'\{"time": .*"message": "twinkle-server starts .*"\}\n'),
        (["launch", "--help"], ""),
        (["status"], ""),
    ],
)
def test_the_first_line_comes_before_anything_slow(arguments: list[str], first: str) -> None:
    command = [sys.executable, "-c", FIRST_LINE, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120)
    assert done.stdout == "this far\n"
    assert re.fullmatch(first, done.stderr)


@pytest.mark.parametrize("terminal", [True, False])
def test_bars_are_drawn_on_terminals_only(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    for name in NO_BARS:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr("twinkle.server.runtime.embedded.serve_embedded", lambda *_: None)
    launch.run_server(default_config("m", backend="mock"))
    assert {name: os.environ.get(name) for name in NO_BARS} == (dict.fromkeys(NO_BARS) if terminal else NO_BARS)


def test_a_server_without_models(own_server) -> None:
    """It serves sessions and nothing else."""
    server = own_server({"applications": [{"name": "server", "import_path": "server"}]})
    answer = httpx.get(f"{server.url}/api/v1/get_server_capabilities", headers={"X-API-Key": "tml-a"}, trust_env=False)
    assert answer.json()["supported_models"] == []
    assert "serving no model" in server.log()
    assert "create_lora_training_client" not in server.log()


def test_the_announcement_names_a_model() -> None:
    config = default_config("m", backend="mock")
    assert 'create_lora_training_client(base_model="m")' in announcement(config, [], [], "http://x")
    fields = config.model_dump()
    next(each for each in fields["applications"] if each["import_path"] == "model")["args"]["train_mode"] = "full"
    said = announcement(ServerConfig.model_validate(fields), [], [], "http://x")
    assert 'init_tinker_client("http://x", "tml-local")' in said
    assert 'create_full_training_client("m")' in said
    assert "create_lora_training_client" not in said


def test_it_is_light() -> None:
    code = "import sys, twinkle.server; sys.exit('pydantic' in sys.modules or 'fastapi' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], env=environment(), check=True)
