"""Statements of the documents about Megatron: what check-config says about their files, and how their servers start.

tests/cookbook/megatron starts the servers, with a tiny model on CPU processes; tests/on_ray/megatron trains on them.
"""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.paths import ROOT
from twinkle.server.cli import command_line as cli
from twinkle.server.config import ServerConfig

CLIENT = ROOT / "cookbook" / "client"
MEGATRON = CLIENT / "server" / "megatron"
YAML = Path(__file__).parent / "yaml"


def notes_on(config: Path | dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> str:
    """Run check-config, which must accept the configuration, and return its notes."""
    file = config if isinstance(config, Path) else tmp_path / "server_config.yaml"
    if isinstance(config, dict):
        file.write_text(yaml.safe_dump(config))
    assert cli.main(["check-config", str(file)]) == 0, capsys.readouterr().err
    return capsys.readouterr().err


def with_fragment() -> dict[str, Any]:
    """Return the documented Twinkle file with the fragment's model application in the place of its own."""
    config: dict[str, Any] = yaml.safe_load((YAML / "twinkle.yaml").read_text())
    (config["applications"][1],) = yaml.safe_load((YAML / "megatron_fragment.yaml").read_text())
    return config


def launched_by(script: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the arguments that a server script gives to twinkle-server."""
    asked: list[list[str]] = []
    monkeypatch.setattr(cli, "main", lambda arguments: asked.append(arguments) or 0)
    monkeypatch.setattr(sys, "argv", ["server.py"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(script), run_name="__main__")
    return asked[0]


def of_its_family(file: Path, tmp_path: Path, layers: int) -> dict[str, Any]:
    """Return a file's configuration with its model on this machine: a config.json of Qwen3.5, which reads images."""
    assert re.search(r"Qwen3\.[56]-", file.read_text())
    model = tmp_path / "model"
    model.mkdir()
    sizes = {"num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 9216}
    text = {"model_type": "qwen3_5_text", "num_hidden_layers": layers, **sizes}
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": text}))
    config: dict[str, Any] = yaml.safe_load(file.read_text())
    for application in config["applications"]:
        if "model_id" in (application.get("args") or {}):
            application["args"]["model_id"] = str(model)
    return config


def mesh_of(config: dict[str, Any]) -> dict[str, Any]:
    (found,) = [each["args"] for each in config["applications"] if each["import_path"] == "model"]
    mesh: dict[str, Any] = found["device_mesh"]
    return mesh


def test_row_02_use_megatron(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "use_megatron: became backend: megatron" in notes_on(with_fragment(), capsys, tmp_path)


def test_row_04_parallel_strategies(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = with_fragment()
    args = config["applications"][1]["args"]
    args["device_group"]["ranks"] = args["nproc_per_node"] = 8
    args["device_mesh"] = {"device_type": "cuda", "tp_size": 2, "pp_size": 2, "dp_size": 2}
    assert "megatron, dp 2 × tp 2 × pp 2, 8 processes" in notes_on(config, capsys, tmp_path)


@pytest.mark.parametrize("folder", ["twinkle", "tinker"])
def test_older_servers(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server script serves the file beside it, which is the 4B file."""
    beside = CLIENT / folder / "megatron" / "server_config.yaml"
    assert launched_by(beside.with_name("server.py"), monkeypatch) == ["launch", "-c", str(beside)]
    assert ServerConfig.from_yaml(beside) == ServerConfig.from_yaml(MEGATRON / "server_config_4b.yaml")


def test_row_06_twinkle_server(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = of_its_family(CLIENT / "twinkle/megatron/server_config.yaml", tmp_path, layers=32)
    assert "megatron, dp 2 × tp 1 × pp 1, 2 processes" in notes_on(config, capsys, tmp_path)


def test_row_11_tinker_server(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = of_its_family(CLIENT / "tinker/megatron/server_config.yaml", tmp_path, layers=32)
    assert "megatron, dp 2 × tp 1 × pp 1, 2 processes" in notes_on(config, capsys, tmp_path)


def test_row_12_tinker_7b_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A Qwen2.5 model, which Megatron supports."""
    said = notes_on(CLIENT / "tinker/megatron/server_config_7b.yaml", capsys, tmp_path)
    assert "megatron, dp 2 × tp 1 × pp 1, 2 processes" in said
    assert "need 3 GPUs" in said


def test_row_19_backend(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = with_fragment()
    args = config["applications"][1]["args"]
    del args["use_megatron"]
    args["backend"] = "megatron"
    assert "megatron, dp 2 × tp 1 × pp 1, 2 processes" in notes_on(config, capsys, tmp_path)


def run_script(tmp_path: Path, *arguments: str, running: bool = False) -> tuple[int, list[str], str]:
    """Run run.sh with programs in the place of Ray and of the server.

    Return its exit code, the commands that it gave, and its output. ``running``: whether there is a cluster already.
    """
    programs, commands = tmp_path / "bin", tmp_path / "commands"
    programs.mkdir(exist_ok=True)
    commands.write_text("")
    status = "exit 0" if running else "exit 1"
    for name in ("ray", "twinkle-server"):
        program = programs / name
        shown = '"${CUDA_VISIBLE_DEVICES-all}"'
        program.write_text(
            f'#!/bin/sh\n[ "$1" = status ] && {status}\necho "{name} $* on "{shown}" at $RAY_ADDRESS" >> "{commands}"\n'
        )
        program.chmod(0o755)
    variables = {"PATH": f"{programs}{os.pathsep}/usr/bin{os.pathsep}/bin"}
    done = subprocess.run(
        [str(MEGATRON / "run.sh"), *arguments], env=variables, capture_output=True, text=True, timeout=60
    )
    return done.returncode, commands.read_text().splitlines(), done.stdout + done.stderr


def test_row_22_run_script(tmp_path: Path) -> None:
    """All documented options work. Redis is not started: the server has no use for it."""
    code, commands, said = run_script(tmp_path, "--help")
    assert (code, commands) == (0, [])
    for option in (
        "--restart",
        "--head",
        "--gpu-workers",
        "--cpu-workers",
        "--temp-dir",
        "--save-dir",
        "--server-config",
    ):
        assert f"\n  {option} " in said
    file, at = str(MEGATRON / "server_config_4b.yaml"), "at 127.0.0.1:6379"
    code, commands, said = run_script(
        tmp_path,
        *("--restart", "--head", "0,1", "--gpu-workers", "2,3;4", "--cpu-workers", "1", "--temp-dir", "/tmp/r"),
        *("--save-dir", "/data", "--server-config", file, "--port", "9000"),
    )
    assert code == 0, said
    assert commands == [
        "ray stop on all at ",
        f"ray start --num-gpus 2 --head --port 6379 --temp-dir /tmp/r on 0,1 {at}",
        f"ray start --num-gpus 2 --address 127.0.0.1:6379 on 2,3 {at}",
        f"ray start --num-gpus 1 --address 127.0.0.1:6379 on 4 {at}",
        f"ray start --num-gpus 0 --address 127.0.0.1:6379 on  {at}",
        f"twinkle-server launch -c {file} --data-dir /data --port 9000 on all {at}",
    ]
    code, commands, said = run_script(tmp_path)
    assert commands == [
        f"ray start --head --port 6379 on all {at}",
        f"twinkle-server launch -c {MEGATRON}/server_config.yaml on all {at}",
    ]
    code, commands, said = run_script(tmp_path, running=True)
    assert commands == [f"twinkle-server launch -c {MEGATRON}/server_config.yaml on all {at}"]
    for wrong in (["--head"], ["--cpu-workers", "two"], ["--server-config", "missing.yaml"]):
        code, commands, said = run_script(tmp_path, *wrong)
        assert (code, commands) == (2, []), said
        assert wrong[0] in said


def test_row_23_27b_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The file asks for eight GPUs, and for a mesh that its model can have."""
    said = notes_on(MEGATRON / "server_config.yaml", capsys, tmp_path)
    assert "megatron, dp 2 × tp 1 × pp 2, 4 processes" in said
    assert "need 8 GPUs" in said
    config = of_its_family(MEGATRON / "server_config.yaml", tmp_path, layers=64)
    assert "megatron, dp 2 × tp 1 × pp 2, 4 processes" in notes_on(config, capsys, tmp_path)
    mesh_of(config).update(tp_size=2, dp_size=1)
    (tmp_path / "cut.yaml").write_text(yaml.safe_dump(config))
    assert cli.main(["check-config", str(tmp_path / "cut.yaml")]) == 2
    said = capsys.readouterr().err
    assert "qwen3_5 has layers with linear attention, which are not cut" in said
    assert "the nearest mesh that works: dp_size=2, tp_size=1, pp_size=2" in said


def test_row_24_4b_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The file asks for three GPUs, and for a mesh that its model can have."""
    said = notes_on(MEGATRON / "server_config_4b.yaml", capsys, tmp_path)
    assert "megatron, dp 2 × tp 1 × pp 1, 2 processes" in said
    assert "need 3 GPUs" in said
    config = of_its_family(MEGATRON / "server_config_4b.yaml", tmp_path, layers=32)
    assert "megatron, dp 2 × tp 1 × pp 1, 2 processes" in notes_on(config, capsys, tmp_path)


def test_row_48_fragment(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The older form of a mesh, ``mesh`` and ``mesh_dim_names``, works."""
    said = notes_on(with_fragment(), capsys, tmp_path)
    assert "megatron, dp 2 × tp 1 × pp 1, 2 processes" in said


def test_row_49_no_adapter_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "adapter_config" not in with_fragment()["applications"][1]["args"]
    assert "adapter_config" not in notes_on(with_fragment(), capsys, tmp_path)


def test_row_57_module_of_the_backend() -> None:
    with pytest.raises(ModuleNotFoundError, match="launch_server starts all that a configuration names"):
        __import__("twinkle.server.model.backends.megatron_model")


def test_row_82_processors() -> None:
    for file in MEGATRON.glob("*.yaml"):
        assert ServerConfig.from_yaml(file).processor is not None, file.name


def test_row_83_default_of_the_server_script(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = launched_by(MEGATRON / "server.py", monkeypatch)
    assert asked == ["launch", "-c", str(MEGATRON / "server_config_4b.yaml")]
