"""A server with the demo model, for recipes and tutorials that run in a directory with stand-ins for a hub."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cookbook.recipes.offline_hub import SERVED_NAMES, write_hub
from tests.cookbook.recipes.offline_pictures import VISION_MODEL, write_vision_hub
from tests.cookbook.recipes.recipe_runs import Bench
from tests.support.paths import ROOT

REPOSITORY = ROOT
PYTHON = REPOSITORY / ".venv-cookbook" / "bin" / "python"

# User settings that the recipes would read. The tests set them themselves.
_USER_SETTINGS = re.compile(r"TINKER_|HF_|TRANSFORMERS_|WANDB_|PYTHONPATH$|PYTHONWARNINGS$")
_START_SECONDS = 300


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Runs recipes from a local directory against a running server."""
    with _serving(tmp_path_factory.mktemp("cookbook"), write_hub, SERVED_NAMES) as running:
        yield running


@pytest.fixture(scope="session")
def seeing_bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Runs recipes with pictures against a server of a vision model."""
    with _serving(tmp_path_factory.mktemp("pictures"), write_vision_hub, [VISION_MODEL]) as running:
        yield running


@contextmanager
def _serving(directory: Path, write: Callable[[Path], Path], names: list[str]) -> Iterator[Bench]:
    """Serve a model under these names. ``write`` writes it, and what recipes need beside it, into a directory.

    At the end the server's log must have no warning.
    """
    if not PYTHON.exists():
        pytest.skip("the cookbook is not installed; `make test-cookbook` does that")
    model = write(directory / "hub")
    log = directory / "server.log"
    server = _start_server(directory, model, names, log)
    try:
        yield Bench(_announced_url(server, log), PYTHON, directory / "hub", directory / "runs", _environment(directory))
    finally:
        server.terminate()
        try:
            code = server.wait(60)
        finally:
            server.kill()
    said = log.read_text()
    assert code == 0, said
    assert not re.search(r" (WARNING|ERROR|CRITICAL) |Traceback", said), said


def _environment(directory: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not _USER_SETTINGS.match(name)}
    local = "127.0.0.1,localhost"
    return kept | {
        "HF_HOME": str(directory / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TINKER_API_KEY": "tml-cookbook",
        "NO_PROXY": local,
        "no_proxy": local,
        "OMP_NUM_THREADS": "1",  # the client computes almost nothing, and the server needs the cores
    }


# --- the server -------------------------------------------------------------------------------------------------------


def _start_server(directory: Path, model: Path, names: list[str], log: Path) -> subprocess.Popen[bytes]:
    trainer = {"model_id": str(model), "backend": "transformers", "aliases": names}
    applications = [
        {"name": "server", "import_path": "server"},
        {"name": "model", "import_path": "model", "args": trainer},
        {"name": "sampler", "import_path": "sampler", "args": {"model_id": str(model), "sampler_type": "torch"}},
    ]
    http = {"host": "127.0.0.1", "port": 0}
    config = directory / "server.yaml"  # JSON is YAML
    config.write_text(
        json.dumps(
            {
                "runtime": "embedded",
                "data_dir": str(directory / "data"),
                "http_options": http,
                "applications": applications,
            }
        )
    )
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "twinkle.server", "launch", "-c", str(config)],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY / "src")},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )


def _announced_url(server: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + _START_SECONDS
    while (announced := re.search(r"^listening on (http://\S+)", log.read_text(), re.MULTILINE)) is None:
        assert server.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    return announced[1]
