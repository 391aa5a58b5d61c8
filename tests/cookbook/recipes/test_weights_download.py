"""tinker-cookbook's download of trained weights, which are encrypted with a key made for this download."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.servers.running import Server, Tenant, environment

pytestmark = pytest.mark.cookbook

PYTHON = ROOT / ".venv-cookbook" / "bin" / "python"

DOWNLOAD = (
    "import sys; from tinker_cookbook import weights; weights.download(tinker_path=sys.argv[1], output_dir=sys.argv[2])"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if not PYTHON.exists():
        pytest.skip("the cookbook is not installed; `make test-cookbook` does that")
    running = Server(tmp_path_factory.mktemp("server")).start()
    yield running
    assert running.stop() == 0


@pytest.mark.parametrize("kind", ["weights", "external_weights"])
def test_downloading(server: Server, kind: str, tmp_path: Path) -> None:
    tenant = Tenant(server.url, "tml-download")
    model = tenant.model()
    request = {"weights": "save_weights", "external_weights": "save_weights_external"}[kind]
    path = tenant.json(tenant.submit(request, {"model_id": model, "seq_id": 1, "path": "final"}))["path"]
    settings = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": tenant.key, "HOME": str(tmp_path)}
    kept = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
    arguments = [PYTHON, "-c", DOWNLOAD, path, str(tmp_path / "out")]
    done = subprocess.run(arguments, env={**kept, **settings}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    files = sorted(file.name for file in (tmp_path / "out").iterdir())
    assert files == ["adapter_config.json", "adapter_model.safetensors"]
    left = [each["tinker_path"] for each in tenant.get("checkpoints").json()["checkpoints"]]
    assert [each for each in left if each != path and "external_weights" in each] == []
