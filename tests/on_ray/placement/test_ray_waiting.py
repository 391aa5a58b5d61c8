"""A launch on a cluster that is too small or in use: it says what it waits for, and a signal ends it without leftovers.

Ray counts the GPUs of these clusters, but they do not exist.
"""

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

HOLDS_THE_GPU = """
import sys, ray
ray.init("auto", log_to_driver=False, logging_level="error")
class Holder:
    def hold(self):
        return "held"
holder = ray.remote(num_cpus=0, num_gpus=1)(Holder).remote()
print(ray.get(holder.hold.remote()), flush=True)
sys.stdin.read()
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
            end(process, log, sent, environment)
        finally:
            process.kill()


def test_an_application_whose_gpu_is_in_use(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The cluster is large enough, so the launch says what is free, and in which state Serve's replicas are."""
    directory = tmp_path_factory.mktemp("r")
    with ray_start(directory, "--num-cpus=2", "--num-gpus=1") as environment:
        command = [sys.executable, "-c", HOLDS_THE_GPU]
        holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        process, log = launched(directory, environment, 1)
        try:
            wait_for("m does not run yet. Trained: 1 starting", log, process)
            assert "; it needs 0.1 CPUs and 1 GPUs, and " in log.read_text()
            assert "and 0 GPUs of the cluster are free" in log.read_text()
            end(process, log, signal.SIGTERM, environment)
        finally:
            process.kill()
            holder.kill()


def end(process: subprocess.Popen[bytes], log: Path, sent: int, environment: dict[str, str]) -> None:
    """End a launch that waits, and check that it leaves neither applications nor reservations."""
    process.send_signal(sent)
    assert process.wait(90) == 0
    said = log.read_text(errors="replace")
    assert f"{signal.Signals(sent).name}: taking down what is deployed" in said
    assert "stack trace" not in said
    assert "Traceback" not in said
    left = subprocess.run([sys.executable, "-c", LEFT], env=environment, capture_output=True, text=True, timeout=90)
    assert left.stdout.split() == ["[]", "[]"], left.stderr
