"""The cookbook's files under the names that the documents give: scripts run, servers start."""

import json
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest

from tests.documented.conftest import MODEL
from tests.support.paths import ROOT
from tests.support.servers.forked_servers import fork_script, run_forked
from tests.support.servers.running import environment
from twinkle.server.cli import command_line as cli

CLIENT = ROOT / "cookbook/client"


def usage(script: Path) -> str:
    """Return what ``--help`` prints, without the first paragraph, which holds the name of the script."""
    done = run_forked([script, "--help"], {**environment(), "COLUMNS": "100"})
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("\n\n")[2]


def assert_runs(documented: str, script: str) -> None:
    """Check that the documented path runs ``script``, which has its own test in tests/cookbook/client."""
    assert usage(CLIENT / documented) == usage(CLIENT / script)


def run_script(path: str, variables: Mapping[str, str], *arguments: object) -> str:
    done = run_forked([CLIENT / path, *map(str, arguments)], variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


def assert_serves(script: Path, port: int, tmp_path: Path) -> None:
    """Start a server script, wait until its server answers, and stop it with Ctrl-C."""
    variables = {**environment(), "TWINKLE_MODEL": MODEL, "TWINKLE_DEFAULT_SAVE_DIR": str(tmp_path / "data")}
    log = tmp_path / "server.log"
    with log.open("wb") as out:
        process = fork_script([script], variables, out)
    try:
        deadline = time.monotonic() + 120
        while True:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            try:
                url = f"http://127.0.0.1:{port}/api/v1/get_server_capabilities"
                served = httpx.get(url, headers={"X-API-Key": "tml-anyone"}, trust_env=False)
                break
            except httpx.TransportError:
                time.sleep(0.05)
        assert MODEL.removeprefix("random://") in served.text
        process.send_signal(signal.SIGINT)
        assert process.wait(120) in (0, 130)
    finally:
        process.kill()


def assert_valid(file: Path) -> None:
    assert cli.main(["check-config", str(file)]) == 0


def test_row_05_twinkle_transformer_server(cookbook: tuple[Path, int], tmp_path: Path) -> None:
    copy, port = cookbook
    assert_serves(copy / "client/twinkle/transformer/server.py", port, tmp_path)
    assert_valid(CLIENT / "twinkle/transformer/server_config.yaml")


def test_row_07_twinkle_grpo() -> None:
    assert_runs("twinkle/grpo.py", "twinkle/self_host/short_math_grpo.py")


def test_row_08_twinkle_sample(client_environment: Mapping[str, str]) -> None:
    assert "same again: True" in run_script("twinkle/sample.py", client_environment)


def test_row_09_twinkle_self_cognition() -> None:
    assert_runs("twinkle/self_congnition.py", "twinkle/self_host/self_cognition.py")


def test_row_10_tinker_transformer_server() -> None:
    """The script itself is started in the test of row 17."""
    assert_valid(CLIENT / "tinker/transformer/server_config.yaml")


def test_row_13_tinker_lora() -> None:
    """It is run in the test of row 18."""
    assert_runs("tinker/lora.py", "tinker/self_host/lora.py")


def test_row_14_tinker_sample() -> None:
    assert_runs("tinker/sample.py", "tinker/self_host/sample.py")


def test_row_15_tinker_self_cognition() -> None:
    """The script asks before and after training; its own test runs it."""
    assert_runs("tinker/self_congnition.py", "tinker/self_host/self_cognition.py")
    text = (CLIENT / "tinker/self_host/self_cognition.py").read_text()
    assert text.index('print("before') < text.index("forward_backward(") < text.index('print("after')


def test_row_16_tinker_grpo() -> None:
    assert_runs("tinker/short_math_grpo.py", "tinker/self_host/short_math_grpo.py")


def test_row_17_python_tinker_transformer_server(cookbook: tuple[Path, int], tmp_path: Path) -> None:
    copy, port = cookbook
    assert_serves(copy / "client/tinker/transformer/server.py", port, tmp_path)


def test_row_18_python_tinker_lora(client_environment: Mapping[str, str]) -> None:
    assert "loss" in run_script("tinker/lora.py", client_environment)


def test_row_21_end_to_end_configuration() -> None:
    assert_valid(CLIENT / "server/transformer/server_config_e2e.yaml")


def test_row_25_twinkle_pictures() -> None:
    """tests/cookbook/client/test_multi_modal.py runs it, on a server and in its own process."""
    assert_runs("twinkle/multi_modal.py", "twinkle/self_host/multi_modal.py")


def test_row_26_twinkle_self_host() -> None:
    assert_runs("twinkle/self_host/self_congnition.py", "twinkle/self_host/self_cognition.py")


def test_row_27_twinkle_pictures_on_modelscope() -> None:
    assert_runs("twinkle/modelscope/multi_modal.py", "twinkle/self_host/multi_modal.py")


def test_row_28_twinkle_modelscope() -> None:
    assert_runs("twinkle/modelscope/self_congnition.py", "twinkle/self_host/self_cognition.py")


def test_row_29_tinker_pictures() -> None:
    """tests/cookbook/client/test_multi_modal.py runs it."""
    assert_runs("tinker/multi_modal.py", "tinker/self_host/multi_modal.py")


@pytest.mark.parametrize("folder", ["twinkle", "tinker"])
def test_row_30_tree_of_the_cookbook(folder: str) -> None:
    """The document's own commands say cookbook/client/…, and there the folders are."""
    assert (ROOT / "cookbook/client" / folder / "self_host/sample.py").exists()
    assert not (ROOT / "cookbook" / folder).exists()


@pytest.mark.thorough
def test_row_78_sequence_parallel_with_fsdp(model_folder: Path, tmp_path: Path) -> None:
    """It runs in one process here. tests/model/parallel and tests/cookbook/modes run it in several."""
    _trains("sp_fsdp_dense.py", model_folder, tmp_path)


@pytest.mark.thorough
def test_row_79_fsdp2(model_folder: Path, tmp_path: Path) -> None:
    _trains("fsdp2.py", model_folder, tmp_path)


def _trains(script: str, model: Path, tmp_path: Path) -> None:
    options = ["--epochs", 1, "--batch-size", 24, "--model", model, "--output", tmp_path, "--curve", tmp_path / "curve"]
    done = run_forked([ROOT / "cookbook/transformers" / script, *map(str, options)], environment())
    assert done.returncode == 0, done.stderr
    assert len(json.loads((tmp_path / "curve").read_text())) == 2


def test_row_80_combined_step() -> None:
    assert "clip_grad_and_step(" in (CLIENT / "twinkle/self_host/self_cognition.py").read_text()
    assert_runs("twinkle/self_host/self_congnition.py", "twinkle/self_host/self_cognition.py")


def test_row_81_grpo_on_gsm8k() -> None:
    assert_runs("twinkle/self_host/grpo.py", "twinkle/self_host/short_math_grpo.py")
    assert "gsm8k" in usage(CLIENT / "twinkle/self_host/grpo.py").lower()


def test_row_84_chinese_readme() -> None:
    """tests/test_readmes.py compares its commands, code and links with README.md."""
    assert "twinkle-server launch" in (ROOT / "README_ZH.md").read_text()


def test_row_95_client_server(cookbook: tuple[Path, int], tmp_path: Path) -> None:
    copy, port = cookbook
    assert_serves(copy / "client/server.py", port, tmp_path)
    assert_valid(CLIENT / "server_config.yaml")
