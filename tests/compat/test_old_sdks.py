"""Older tinker SDKs, each in an environment of its own (make test-compat), on one running server at the same time."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "server"))
sys.path.append(str(Path(__file__).parents[1] / "contract"))
from serving import MODEL, SdkServer

pytestmark = pytest.mark.compat

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
OLD = ("0.16.1", "0.22.4")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SdkServer]:
    running = SdkServer(tmp_path_factory.mktemp("server")).start()
    yield running
    assert running.stop() == 0


def interpreters() -> dict[str, Path]:
    old = {version: ROOT / f".venv-tinker-{version}" / "bin" / "python" for version in OLD}
    return {**old, "installed": Path(sys.executable)}


def train(server: SdkServer, name: str, python: Path) -> dict[str, list]:
    key = "tml-" + name.replace(".", "")
    environment = {**os.environ, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "TINKER_TELEMETRY": "0"}
    command = [str(python), str(HERE / "train.py"), server.url, key, MODEL]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, f"{name}\n{done.stderr[-3000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def test_all_at_once(server: SdkServer) -> None:
    with ThreadPoolExecutor(3) as pool:
        runs = {name: pool.submit(train, server, name, python) for name, python in interpreters().items()}
        results = {name: run.result() for name, run in runs.items()}
    newest = results["installed"]
    assert newest["losses"][-1] < newest["losses"][0]
    for name, result in results.items():
        assert result["losses"] == pytest.approx(newest["losses"], rel=1e-5), name
        assert result["tokens"] == newest["tokens"], name
        assert result["scores"][0] is None
        assert result["scores"][1:] == pytest.approx(newest["scores"][1:], rel=1e-5), name
