"""A launch on a cluster that is too small: it says what it waits for, and a signal ends it without leftovers."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import twinkle

if not twinkle.exists("ray"):
    pytest.skip("Ray is not installed; `make test-ray` does that", allow_module_level=True)

from tests.on_ray.placement.started_clusters import ray_start
from tests.support.servers.running import free_port

pytestmark = pytest.mark.ray

LEFT = """
import ray
from ray import serve
ray.init("auto", namespace="twinkle_cluster", log_to_driver=False, logging_level="error")
print(sorted(serve.status().applications))
print([one["name"] for one in ray.util.placement_group_table().values() if one["state"] != "REMOVED"])
"""


def launched(directory: Path, environment: dict[str, str], ranks: object) -> tuple[subprocess.Popen[bytes], Path]:
    group = {"name": "g", "ranks": ranks, "device_type": "cuda"}
    args = {"model_id": "random://llama-tiny", "backend": "transformers", "device_group": group}
    light: list[Any] = [{"name": "Trained", "ray_actor_options": {"num_cpus": 0.1}}]
    config = {
        "runtime": "ray",
        "data_dir": str(directory / "data"),
        "http_options": {"host": "127.0.0.1", "port": free_port()},
        "applications": [
            {"name": "server", "import_path": "server"},
            {"name": "m", "import_path": "model", "args": args, "deployments": light},
        ],
    }
    file, log = directory / "config.yaml", directory / "launch.log"
    file.write_text(json.dumps(config))
    command = [sys.executable, "-m", "twinkle.server", "launch", "-c", str(file)]
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env=environment), log


def wait_for(text: str, log: Path, process: subprocess.Popen[bytes], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while text not in log.read_text(errors="replace"):
        assert process.poll() is None, log.read_text(errors="replace")
        assert time.monotonic() < deadline, log.read_text(errors="replace")
        time.sleep(0.1)


@pytest.mark.parametrize(("ranks", "sent"), [(2, signal.SIGTERM), ([0, 1], signal.SIGINT)])
def test_a_launch_that_waits(tmp_path_factory: pytest.TempPathFactory, ranks: object, sent: int) -> None:
    directory = tmp_path_factory.mktemp("r")
    with ray_start(directory, "--num-cpus=2") as environment:
        process, log = launched(directory, environment, ranks)
        try:
            wait_for("waiting for 2 GPUs: the cluster has 0 (needed by application m", log, process)
            if ranks == 2:  # named GPUs are reserved before anything is deployed
                wait_for("server: running", log, process)
            process.send_signal(sent)
            assert process.wait(90) == 0
        finally:
            process.kill()
        said = log.read_text(errors="replace")
        assert f"{signal.Signals(sent).name}: taking down what is deployed" in said
        assert "stack trace" not in said
        assert "Traceback" not in said
        left = subprocess.run([sys.executable, "-c", LEFT], env=environment, capture_output=True, text=True, timeout=90)
        assert left.stdout.split() == ["[]", "[]"], left.stderr
