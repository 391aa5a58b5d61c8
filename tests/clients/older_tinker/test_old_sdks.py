"""Older tinker SDKs, each in its own environment (make test-compat), use one running server at the same time."""

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.models.sdk_images import SEES, jpeg, png, processing
from tests.support.paths import ROOT
from tests.support.servers.serving import MODEL, SdkServer, key_of

pytestmark = pytest.mark.compat

HERE = Path(__file__).parent
OLD = ("0.16.1", "0.22.4")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SdkServer]:
    running = SdkServer(tmp_path_factory.mktemp("server")).start()
    yield running
    assert running.stop() == 0


def interpreters() -> dict[str, Path]:
    old = {version: ROOT / f".venv-tinker-{version}" / "bin" / "python" for version in OLD}
    return {**old, "installed": Path(sys.executable)}


def run(command: list[str], server: SdkServer, name: str) -> str:
    """Run a command and return what it prints. The SDK's command line finds the server in the environment."""
    local = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "TINKER_TELEMETRY": "0"}
    environment = {**os.environ, **local, "TINKER_BASE_URL": server.url, "TINKER_API_KEY": key_of(name)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, f"{name}\n{done.stdout[-1000:]}{done.stderr[-3000:]}"
    return done.stdout


def answers(
    script: str, server: SdkServer, name: str, python: Path, *arguments: str, model: str = MODEL
) -> dict[str, Any]:
    said = run([str(python), str(HERE / script), server.url, key_of(name), model, *arguments], server, name)
    content: dict[str, Any] = json.loads(said.splitlines()[-1])
    return content


def test_all_at_once(server: SdkServer) -> None:
    with ThreadPoolExecutor(3) as pool:
        runs = {name: pool.submit(answers, "train.py", server, name, python) for name, python in interpreters().items()}
        results = {name: run.result() for name, run in runs.items()}
    newest = results["installed"]
    assert newest["losses"][-1] < newest["losses"][0]
    for name, result in results.items():
        assert result["losses"] == pytest.approx(newest["losses"], rel=1e-5), name
        assert result["tokens"] == newest["tokens"], name
        assert result["scores"][0] is None
        assert result["scores"][1:] == pytest.approx(newest["scores"][1:], rel=1e-5), name


def test_all_see_the_same(tmp_path: Path) -> None:
    """Image chunks of all SDKs, in protobuf and in JSON, mean the same."""
    images = [png(64, 96, 1), jpeg(60, 60, 2)]
    given = [
        {
            "data": base64.b64encode(image.data).decode(),
            "format": image.format,
            "expected_tokens": processing().size(image).tokens,
        }
        for image in images
    ]
    file = tmp_path / "images.json"
    file.write_text(json.dumps(given))
    seeing = SdkServer(tmp_path, model=SEES).start()
    with ThreadPoolExecutor(3) as pool:
        runs = {
            name: pool.submit(answers, "see.py", seeing, name, python, str(file), model=SEES)
            for name, python in interpreters().items()
        }
        results = {name: run.result() for name, run in runs.items()}
    assert seeing.stop() == 0
    newest = results["installed"]
    assert newest["losses"][-1] < newest["losses"][0]
    assert len(newest["scores"]) == 3 + sum(each["expected_tokens"] for each in given)
    for name, result in results.items():
        assert result["losses"] == pytest.approx(newest["losses"], rel=1e-5), name
        assert result["tokens"] == newest["tokens"], name
        assert result["scores"][1:] == pytest.approx(newest["scores"][1:], rel=1e-5), name


FILES = {"adapter_config.json", "adapter_model.safetensors", "checkpoint_complete"}


@pytest.fixture(scope="module")
def older(server: SdkServer) -> dict[str, dict[str, Any]]:
    """Return the output of older.py for each older SDK; they run at the same time."""
    with ThreadPoolExecutor(len(OLD)) as pool:
        runs = {name: pool.submit(answers, "older.py", server, name, interpreters()[name]) for name in OLD}
        return {name: run.result() for name, run in runs.items()}


@pytest.mark.parametrize("name", OLD)
def test_dpo_against_the_base_model(older: dict[str, dict[str, Any]], name: str) -> None:
    """As the existing library's scripts do it: log-probabilities without the adapter are sent back as ref_logps."""
    said = older[name]
    first, last = said["reference"]
    assert last == first  # training does not change the base model
    margins = [metrics["rewards/margins:mean"] for metrics in said["metrics"]]
    assert margins[0] == pytest.approx(0, abs=1e-5)
    assert margins[-1] > margins[0]
    assert said["metrics"][-1]["loss:sum"] < said["metrics"][0]["loss:sum"]


def test_each_targets_part_of_the_loss(older: dict[str, dict[str, Any]]) -> None:
    """SDKs that send JSON get elementwise_loss; others get only logprobs."""
    for output, weights in zip(older["0.16.1"]["outputs"], ([0, 1, 1], [0, 1]), strict=True):
        expected = [-lp * weight for lp, weight in zip(output["logprobs"], weights, strict=True)]
        assert output["elementwise_loss"] == pytest.approx(expected, abs=1e-6)
    assert [set(output) for output in older["0.22.4"]["outputs"]] == [{"logprobs"}] * 2


def test_all_say_the_same(older: dict[str, dict[str, Any]]) -> None:
    one, other = (older[name] for name in OLD)
    assert one["metrics"] == [pytest.approx(metrics, rel=1e-4, abs=1e-6) for metrics in other["metrics"]]


@pytest.mark.parametrize("name", OLD)
def test_archives(server: SdkServer, older: dict[str, dict[str, Any]], name: str, tmp_path: Path) -> None:
    """The client reads the archive's address, and its command line downloads and unpacks the archive."""
    said = older[name]
    assert said["archive"].startswith(f"{server.url}/api/v1/archives/")
    assert said["expires"]
    assert httpx.get(said["archive"], trust_env=False).headers["content-type"] == "application/x-tar"
    script = interpreters()[name].parent / "tinker"
    run([str(script), "checkpoint", "download", said["path"], "--output", str(tmp_path)], server, name)
    (directory,) = tmp_path.iterdir()
    assert {file.name for file in directory.iterdir()} >= FILES
    assert json.loads((directory / "adapter_config.json").read_text())["r"] == 4


@pytest.mark.parametrize("name", OLD)
def test_lists_beside_an_exported_checkpoint(server: SdkServer, older: dict[str, dict[str, Any]], name: str) -> None:
    """These SDKs cannot read a list with an exported checkpoint, which the same tenant may make with a newer one."""
    training = server.service(name).create_lora_training_client(base_model=MODEL, rank=4)
    exported = training.save_weights_external("out").result().path
    newest = server.rest(name).list_user_checkpoints().result().checkpoints
    assert exported in [each.tinker_path for each in newest]
    script = interpreters()[name].parent / "tinker"
    said = run([str(script), "--format", "json", "checkpoint", "list"], server, name)
    paths = [each["tinker_path"] for each in json.loads(said)["checkpoints"]]
    assert older[name]["path"] in paths
    assert exported not in paths


@pytest.mark.parametrize("name", OLD)
def test_giving_a_model_back(older: dict[str, dict[str, Any]], name: str) -> None:
    said = older[name]
    assert said["unloaded"]["model_id"] == said["model_id"]
    assert "unloaded by its client" in said["said"]
