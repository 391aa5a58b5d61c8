"""Two replicas of a model, two gateways, eight adapters: requests reach the right process, even if processes die."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

import twinkle

if not twinkle.exists("ray"):
    pytest.skip("Ray is not installed; `make test-ray` does that", allow_module_level=True)
os.environ["TWINKLE_TEST_RUNTIME"] = "ray"

import tinker
from safetensors.numpy import load_file
from tinker import types

from tests.on_ray.ray_processes import descendants
from tests.support.servers.running import Server
from tests.support.servers.serving import key_of, sequences, tinker_data

pytestmark = pytest.mark.ray

MODEL = "random://llama-tiny"
ADAM = types.AdamParams(learning_rate=5e-4)
STEPS = 6


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    light = {"ray_actor_options": {"num_cpus": 0.2}}
    model = {"model_id": MODEL, "backend": "transformers", "device": "cpu", "dtype": "fp32"}
    applications = [
        {"name": "server", "import_path": "server", "deployments": [{"num_replicas": 2, **light}]},
        {"name": "model", "import_path": "model", "args": model, "deployments": [{"num_replicas": 2, **light}]},
        {"name": "sampler", "import_path": "sampler", "args": {"model_id": MODEL, "sampler_type": "torch"}},
    ]
    running = Server(tmp_path_factory.mktemp("replicas"), {"runtime": "ray", "applications": applications}).start()
    yield running
    running.stop()


def train(server: Server, number: int, name: str, between: threading.Barrier | None = None) -> str:
    """Train one tenant's adapter for some steps and return the address of its last checkpoint."""
    service = tinker.ServiceClient(base_url=server.url, api_key=key_of(f"tenant {number}"))
    client = service.create_lora_training_client(base_model=MODEL, rank=4 + 4 * (number % 2), seed=number)
    for step in range(STEPS):
        if step == STEPS // 2 and between is not None:
            between.wait(60)
        result = client.forward_backward(tinker_data(sequences(100 * number + step)), "cross_entropy")
        client.optim_step(ADAM).result()
        result.result()
    return str(client.save_state(name).result().path)


def weights(server: Server, path: str) -> dict[str, np.ndarray]:
    run, _, name = path.removeprefix("tinker://").split("/")
    (file,) = (server.data_dir / "checkpoints" / run.replace(":", "-") / "weights" / name).rglob(
        "adapter_model.safetensors"
    )
    return load_file(file)


def runs_by_replica(server: Server) -> dict[str, int]:
    import sqlite3

    with sqlite3.connect(server.data_dir / "state.db") as database:
        return dict(database.execute("SELECT replica, COUNT(*) FROM runs GROUP BY replica"))


def test_adapters_are_spread_and_survive_the_death_of_a_replica_and_a_gateway(server):
    with ThreadPoolExecutor(8) as pool:
        undisturbed = list(pool.map(lambda number: train(server, number, "quiet"), range(8)))
    spread = runs_by_replica(server)
    assert set(spread) == {"model-0", "model-1"}
    assert sum(spread.values()) == 8

    barrier = threading.Barrier(9)
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(train, server, number, "disturbed", barrier) for number in range(8)]
        barrier.wait(120)
        (model, *_) = descendants(server, "ServeReplica:model:model-0")
        (gateway, *_) = descendants(server, "ServeReplica:server:Gateway")
        time.sleep(0.2)  # in the middle of training
        os.kill(model, signal.SIGKILL)
        os.kill(gateway, signal.SIGKILL)
        disturbed = [future.result(240) for future in futures]
    for quiet, loud in zip(undisturbed, disturbed, strict=True):
        mine, theirs = weights(server, loud), weights(server, quiet)
        assert mine.keys() == theirs.keys()
        for name in mine:
            assert np.linalg.norm(mine[name] - theirs[name]) <= 1e-5 * max(np.linalg.norm(theirs[name]), 1e-3)
    assert model not in descendants(server, "ServeReplica:model:model-0")


def test_another_replica_takes_over_what_a_smaller_server_has_no_place_for(server, tmp_path):
    """A server in one process also finds the adapters of a server on Ray."""
    path = train(server, 1, "before")
    run = path.removeprefix("tinker://").split("/")[0]
    assert server.stop() == 0
    config = server.config
    config["applications"][1]["deployments"][0]["num_replicas"] = 1
    server.configure(config)
    server.start()
    service = tinker.ServiceClient(base_url=server.url, api_key=key_of("tenant 1"))
    again = service.create_training_client_from_state_with_optimizer(path)
    again.forward_backward(tinker_data(sequences(1)), "cross_entropy").result()
    info = httpx.get(
        f"{server.url}/api/v1/training_runs/{run}", headers={"X-API-Key": key_of("tenant 1")}, trust_env=False
    )
    assert json.loads(info.text)["training_run_id"] == run
