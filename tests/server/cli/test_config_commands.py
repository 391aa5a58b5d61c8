"""check-config and print-config in this process: their output for scripts, and where the file may come from."""

import json
from pathlib import Path

import pytest
import yaml

from twinkle.server.cli import command_line as cli
from twinkle.server.config import ServerConfig, load_config

APPLICATIONS = "applications: [{name: m, import_path: model, args: {model_id: m, backend: mock, max_loras: 3}}]\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "server.yaml"
    file.write_text(APPLICATIONS + "persistence: {url: 'postgresql://me:hush@host/db'}\n")
    return file


def ways(file: Path) -> list[list[str]]:
    return [[str(file)], ["-c", str(file)], ["--config", str(file)], []]


@pytest.mark.parametrize("way", range(4))
def test_ok_and_notes(file: Path, way: int, capsys, monkeypatch) -> None:
    if way == 3:
        monkeypatch.setenv("TWINKLE_SERVER_CONFIG", str(file))
    assert cli.main(["check-config", *ways(file)[way]]) == 0
    said = capsys.readouterr()
    assert said.out == "ok\n"
    assert "note: applications[0].args.max_loras: became limits.max_adapters_per_tenant: 3\n" in said.err


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("limits: [", "not valid YAML"),
        ("limits: {max_rnk: 3}\nruntime: slurm", "invalid configuration\n"),
        (None, "not found"),
    ],
)
def test_what_is_wrong(tmp_path: Path, text: str | None, error: str, capsys) -> None:
    file = tmp_path / "server.yaml"
    if text is not None:
        file.write_text(text)
    assert cli.main(["check-config", "-c", str(file)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert error in said.err
    if text is not None and "slurm" in text:
        assert [line.split(": ")[1] for line in said.err.splitlines()[1:]] == ["runtime", "limits.max_rnk"]


def test_one_file_is_named(file: Path, capsys) -> None:
    assert cli.main(["check-config"]) == 2
    assert "error: FILE" in capsys.readouterr().err
    assert cli.main(["check-config", str(file), "-c", "other.yaml"]) == 2
    assert "one file at a time" in capsys.readouterr().err


def test_json(file: Path, capsys, monkeypatch) -> None:
    assert cli.main(["print-config", "-c", str(file), "--format", "json"]) == 0
    said = capsys.readouterr()
    printed = json.loads(said.out)
    assert said.out == json.dumps(printed, indent=2, sort_keys=True) + "\n"
    assert printed.pop("persistence") == {"url": "postgresql://me:***@host/db"}
    assert "hush" not in said.out + said.err
    config, _ = load_config(file)
    again = ServerConfig.model_validate({**printed, "persistence": config.to_yaml_dict()["persistence"]})
    assert again == config
    monkeypatch.setenv("TWINKLE_PRINT_FORMAT", "json")
    monkeypatch.setenv("TWINKLE_SERVER_CONFIG", str(file))
    assert cli.main(["print-config"]) == 0
    assert capsys.readouterr().out == said.out
    assert cli.main(["print-config", "--format", "yaml"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == json.loads(said.out) | {}


def test_the_namespace(file: Path, capsys, monkeypatch) -> None:
    def printed(*arguments: str) -> object:
        assert cli.main(["print-config", "-c", str(file), "--format", "json", *arguments]) == 0
        return json.loads(capsys.readouterr().out)["ray_namespace"]

    assert printed() is None
    monkeypatch.setenv("TWINKLE_RAY_NAMESPACE", "ours")
    assert printed() == "ours"
    assert printed("--namespace", "theirs") == "theirs"


@pytest.mark.parametrize("command", [["launch"], ["usage"], ["keys", "create"], ["check-config"]])
def test_the_help_of_a_command_says_what_it_does(command: list[str], capsys) -> None:
    assert cli.main([*command, "--help"]) == 0
    described = capsys.readouterr().out.split("\n\n")[1]
    assert described.rstrip().endswith("."), described


def test_exit_codes(capsys, monkeypatch) -> None:
    assert cli.main(["--help"]) == 0
    assert cli.main(["lunch"]) == 2
    assert cli.main(["print-config", "--format", "toml"]) == 2
    assert "--format" in capsys.readouterr().err
    assert cli.main([]) == 2
    assert "check-config" in capsys.readouterr().err, "without arguments there is help"
    monkeypatch.setenv("TWINKLE_PRINT_FORMAT", "toml")
    assert cli.main(["print-config"]) == 1
    assert "TWINKLE_PRINT_FORMAT" in capsys.readouterr().err
