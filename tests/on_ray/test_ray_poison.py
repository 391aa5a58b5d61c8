"""On Ray too, an op that kills its replica, or a process of the replica's group, is run twice and not again."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import twinkle

if not twinkle.exists("ray"):
    pytest.skip("Ray is not installed; `make test-ray` does that", allow_module_level=True)
os.environ["TWINKLE_TEST_RUNTIME"] = "ray"

import httpx

from tests.support.servers.running import MODEL, Server, Tenant, datum, mock_config
from twinkle.server.wire import tinker_pb2 as pb

pytestmark = pytest.mark.ray

POISON = 13_131
RANK_POISON = 199  # a token that the small model has, and no other row
SECONDS = 600.0  # Serve needs a while to replace a replica, and a group to load
START_SECONDS = 900.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    running = Server(tmp_path, mock_config(), poison=POISON, snapshot=600.0, **{"pass": 0.1}).start()
    yield running
    running.stop()


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Server]:
    """A server whose model is a group of two processes, one of which dies of a token."""
    args = {
        "model_id": "random://llama-tiny",
        "aliases": [MODEL],
        "backend": "transformers",
        "dtype": "fp32",
        "device_group": {"name": "model", "ranks": 2, "device_type": "cpu"},
        "device_mesh": {"dp_size": 2},
    }
    light = [{"ray_actor_options": {"num_cpus": 0}}]
    applications = [
        {"name": "server", "import_path": "server", "deployments": light},
        {"name": "model", "import_path": "model", "args": args, "deployments": light},
    ]
    running = Server(tmp_path, {"runtime": "ray", "applications": applications}, rank_poison=RANK_POISON).spawn()
    deadline = time.monotonic() + START_SECONDS
    while not running.is_healthy():
        assert time.monotonic() < deadline, running.log()
        time.sleep(0.5)
    yield running
    running.close()


def fetched(tenant: Tenant, request: str) -> bytes:
    """Return the result, however long the replica is away: the client polls again, as the SDK does."""
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            answer = tenant.poll(request)
        except httpx.TransportError:
            answer = None
        if answer is not None and answer.status_code == 200:
            return answer.content
        assert time.monotonic() < deadline, "no answer" if answer is None else answer.text
        time.sleep(0.5)


def train(tenant: Tenant, model: str) -> list[str]:
    steps = [(tenant.forward_backward(model, 2 * i + 1), tenant.optim_step(model, 2 * i + 2)) for i in range(4)]
    return [request for step in steps for request in step]


def test_a_replica_dies_twice_of_an_op_and_then_goes_on(server: Server) -> None:
    culprit, innocent = Tenant(server.url, "tml-culprit"), Tenant(server.url, "tml-innocent")
    bad, good = culprit.model(), innocent.model()
    requests = train(innocent, good)
    poison = culprit.forward_backward(bad, 1, [datum([1, POISON, 2])])

    outcome = json.loads(fetched(culprit, poison))
    assert outcome["category"] == "server"
    assert outcome["error"] == f"request {poison}: the server died twice while running it; it was not run again"
    results = [fetched(innocent, request) for request in requests]
    again = innocent.model()
    assert results == [fetched(innocent, request) for request in train(innocent, again)]
    assert "forward_backward 1 " in json.loads(fetched(culprit, culprit.optim_step(bad, 2)))["error"]


def test_a_group_dies_twice_of_an_op_and_then_goes_on(group: Server) -> None:
    culprit, innocent = Tenant(group.url, "tml-culprit"), Tenant(group.url, "tml-innocent")
    bad, good = culprit.model(), innocent.model()
    requests = train(innocent, good)
    poison = culprit.forward_backward(bad, 1, [datum([1, RANK_POISON, 2])])

    outcome = json.loads(fetched(culprit, poison))
    assert outcome["error"] == f"request {poison}: the server died twice while running it; it was not run again"
    assert losses(innocent, requests) == pytest.approx(losses(innocent, train(innocent, innocent.model())), abs=1e-5)
    log = group.log()
    assert log.count("this process ends, and Serve starts another one") == 2, log


def losses(tenant: Tenant, requests: list[str]) -> list[float]:
    results = [fetched(tenant, request) for request in requests]
    return [pb.ForwardBackwardOutput.FromString(each).metrics["loss:sum"] for each in results[::2]]
