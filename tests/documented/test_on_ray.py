"""Statements of the documents about Ray.

The server has the documented Twinkle file with three values changed: the model, the kind of device and the port.

Its processes ask for half a CPU in all, so it fits on a machine with two. It listens on 0.0.0.0 and has no keys, so the
launch generates one.
"""

import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

import twinkle

if not twinkle.exists("ray"):
    pytest.skip("Ray is not installed; `make test-ray` does that", allow_module_level=True)

from tests.on_ray.placement.started_clusters import ray_start
from tests.support.paths import ROOT
from tests.support.servers.running import free_port
from twinkle_client import LoraConfig, init_twinkle_client
from twinkle_client.model import MultiLoraTransformersModel

pytestmark = pytest.mark.ray

FILE = ROOT / "tests/documented/yaml/twinkle.yaml"
MODEL = "random://llama-tiny"
_START_SECONDS = 180.0


@dataclass(frozen=True)
class Documented:
    """The running server: its URL, data directory and output, and the variables of its processes."""

    url: str
    data_dir: Path
    config: Path
    log: Path
    environment: dict[str, str]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Documented]:
    """The server on a cluster of two CPUs, which `ray start` started."""
    directory, port = tmp_path_factory.mktemp("d"), free_port()
    text = FILE.read_text()
    for documented, ours in (
        ('"ms://Qwen/Qwen2.5-7B-Instruct"', f'"{MODEL}"'),
        ("device_type: cuda", "device_type: cpu"),
        ("port: 8000", f"port: {port}"),
    ):
        assert documented in text
        text = text.replace(documented, ours)
    (directory / "server.yaml").write_text(text)
    with ray_start(directory, "--num-cpus=2") as environment:
        data_dir, log = directory / "data", directory / "launch.log"
        environment["TWINKLE_DEFAULT_SAVE_DIR"] = str(data_dir)
        command = [sys.executable, "-m", "twinkle.server", "--config", str(directory / "server.yaml")]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            deadline = time.monotonic() + _START_SECONDS
            while "listening on" not in log.read_text():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.2)
            url = f"http://127.0.0.1:{port}"
            yield Documented(url, data_dir, directory / "server.yaml", log, environment)
            process.terminate()
            assert process.wait(120) == 0, log.read_text()
        finally:
            process.kill()


def asked_of_ray(server: Documented, expression: str) -> object:
    """Return the value of an expression, computed by a program that is connected to the server's cluster."""
    script = (
        "import json, ray\nfrom ray import serve\n"
        'ray.init("auto", namespace="twinkle_cluster", log_to_driver=False, logging_level="error")\n'
        f"print(json.dumps({expression}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=server.environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_row_36_twinkle_file(server: Documented) -> None:
    """The generated key trains, and no other."""
    file = server.data_dir / "generated-key"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    key = file.read_text().strip()
    assert key.startswith("tml-")
    said = server.log.read_text()
    assert str(file) in said
    assert key not in said

    client = init_twinkle_client(server.url, key)
    model = MultiLoraTransformersModel("Qwen/Qwen2.5-7B-Instruct", client=client)  # the end of the documented route
    model.add_adapter_to_model("a", LoraConfig(r=8))
    model.set_optimizer("AdamW", lr=0.01)
    rows = [{"input_ids": [1, 2, 3, 4], "labels": [-100, 3, 4, 5]}] * 2
    losses = []
    for _ in range(3):
        losses.append(model.forward_backward(inputs=rows)["loss"])
        model.clip_grad_and_step()
    assert losses[-1] < losses[0]
    for headers in ({}, {"X-API-Key": "EMPTY_TOKEN"}):
        answer = httpx.post(f"{server.url}/api/v1/create_session", json={}, headers=headers, trust_env=False)
        assert answer.status_code == 401, answer.text


def test_row_40_names_of_deployments(server: Documented) -> None:
    """Serve and ``twinkle-server status`` show the names of the file."""
    names = {
        "server": ["TwinkleServer"],
        "models-Qwen2.5-7B-Instruct": ["ModelManagement"],
        "processor": ["ProcessorManagement"],
    }
    shown = asked_of_ray(server, "{name: list(one.deployments) for name, one in serve.status().applications.items()}")
    assert shown == names
    command = [sys.executable, "-m", "twinkle.server", "status", "-c", str(server.config)]
    status = subprocess.run(command, env=server.environment, capture_output=True, text=True, timeout=120)
    assert status.returncode == 0, status.stderr
    lines = [line.split() for line in status.stdout.splitlines()]
    for name, (deployment,) in names.items():
        assert [name, "running"] in lines
        assert [deployment, "healthy"] in lines
    assert os.path.exists(server.data_dir / "logs/models-Qwen2.5-7B-Instruct-0.log")


def test_row_42_cpus_of_processes(server: Documented) -> None:
    """The gateway, the model's replica, its two processes and the processors take 0.1 CPUs each."""
    left = asked_of_ray(server, "ray.available_resources()['CPU']")
    assert left == pytest.approx(2 - 5 * 0.1)


@pytest.mark.parametrize("first", [0, 8])
def test_row_44_named_gpus(tmp_path_factory: pytest.TempPathFactory, first: int) -> None:
    """Each process sees the GPU that was named, and Ray gives it to nobody else.

    ``first``: Ray is started with CUDA_VISIBLE_DEVICES, and numbers count the GPUs in it.
    """
    ids = [str(first + number) for number in range(8)]
    variables = {"CUDA_VISIBLE_DEVICES": ",".join(ids)} if first else {}
    directory = tmp_path_factory.mktemp("r")
    with ray_start(directory, "--num-gpus=8", "--num-cpus=2", **variables) as environment:
        program = str(ROOT / "tests/on_ray/placement/named_gpus.py")
        done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ranks"] == {"org/a": [[ids[5]], [ids[3]]], "org/b": [], "org/c": [[ids[2]], [ids[1]]]}
    visible, options = found["replica"]
    assert visible == {"CUDA_VISIBLE_DEVICES": ids[6]}
    assert options["ray_actor_options"]["num_gpus"] == 0
    assert options["ray_actor_options"]["resources"] == {"node:127.0.0.1": 0.001}
    assert found["sampler"] == {"CUDA_VISIBLE_DEVICES": ids[2]}
    # 5 and 3 are taken whole, 6 and 1 to one half, 2 to three quarters by two applications
    assert found["left"] == 8 - 2 - 1 - 0.75
    assert found["others"] == [ids[0], ids[4], ids[7]]
    assert "GPU 9 is named by device_group of application d" in found["refused"]
    assert "8 GPUs, numbers 0 to 7" in found["refused"]
