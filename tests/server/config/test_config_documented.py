"""The configuration files of the documents that people have in their hands, with their keys and values as they are."""

import subprocess
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.servers.forked_servers import run_forked
from tests.support.servers.running import environment
from twinkle.server.config import load_config
from twinkle.utils.requirements import exists

DOCUMENTED = ROOT / "tests" / "documented" / "yaml"
_MEGATRON = "applications[1].args.backend: megatron"


def check(file: Path) -> subprocess.CompletedProcess[str]:
    return run_forked(["check-config", str(file)], environment())


def test_the_file_for_transformers_with_three_values_changed(tmp_path: Path) -> None:
    text = (DOCUMENTED / "twinkle.yaml").read_text()
    changes = {"ms://Qwen/Qwen2.5-7B-Instruct": "random://llama-tiny", "cuda": "cpu", "port: 8000": "port: 0"}
    for before, after in changes.items():
        assert before in text
        text = text.replace(before, after)
    (tmp_path / "twinkle.yaml").write_text(text)
    told = check(tmp_path / "twinkle.yaml")
    assert (told.returncode, told.stdout) == (0, "ok\n"), told.stderr
    for note in (
        "server_type: dropped, one server speaks both protocols",
        "applications[0].route_prefix: became /api/v1 (it was /server)",
        "applications[2].route_prefix: became /api/v1/processor (it was /processors)",
        "auth.mode: not given; keys is used, because other machines can reach this server (host 0.0.0.0)",
    ):
        assert f"note: {note}" in told.stderr
    config, _ = load_config(tmp_path / "twinkle.yaml")
    assert (config.runtime, config.generates_key) == ("ray", True)
    assert config.served_models[0].names[-1] == "Qwen/Qwen2.5-7B-Instruct"


def test_the_file_for_megatron_and_vllm_names_what_is_missing() -> None:
    told = check(DOCUMENTED / "tinker.yaml")
    assert (told.returncode, told.stdout) == (0, "ok\n"), told.stderr
    assert "note: applications[1].args: megatron, dp 2 " in told.stderr
    for package, key in (("vllm", "applications[2].args.sampler_type: vllm"), ("megatron-core", _MEGATRON)):
        extra = package.removesuffix("-core")
        missing = (
            f"note: {key} needs the package '{package}' (our extra '{extra}'): pip install 'twinkle-posttrain[{extra}]'"
        )
        assert (missing in told.stderr) == (not exists(package))


def test_the_fragment_for_megatron(tmp_path: Path) -> None:
    file = tmp_path / "megatron.yaml"
    file.write_text("applications:\n" + (DOCUMENTED / "megatron_fragment.yaml").read_text())
    told = check(file)
    assert (told.returncode, told.stdout) == (0, "ok\n"), told.stderr
    assert "note: applications[0].args: megatron, dp 2 " in told.stderr


@pytest.mark.parametrize("level", ["INFO", "Info", "info"])
def test_levels_of_the_log_in_any_case(tmp_path: Path, level: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"logging: {{level: {level}}}")
    assert load_config(file)[0].logging.level == "info"
