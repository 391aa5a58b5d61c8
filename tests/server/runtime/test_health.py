"""Health checks never wait for a training step, and report a server that is stuck, recovering or ending."""

import re
import time
from collections.abc import Callable
from types import SimpleNamespace

import httpx
import pytest
from starlette.testclient import TestClient

from tests.support.servers.exposition import scrape, value
from tests.support.servers.otlp_collector import eventually
from tests.support.servers.running import Server, Tenant, mock_config
from twinkle.server.app import make_app
from twinkle.server.config import ServerConfig
from twinkle.server.gateway.fleet import ModelReport
from twinkle.server.runtime.ray.layout import layout_of
from twinkle.server.runtime.ray.remote_fleet import RemoteFleet
from twinkle.server.runtime.ray.replica import ReplicaGoneError


def get(server: Server, path: str) -> httpx.Response:
    return httpx.get(f"{server.url}/api/v1/{path}", trust_env=False, timeout=30)


def test_a_long_step_keeps_nobody_waiting(own_server: Callable[..., Server]) -> None:
    """All routes answer while one long step runs."""
    server = own_server(mock_config(telemetry={"stuck_step_seconds": 0.5}), **{"pass": 4.0})
    tenant = Tenant(server.url, "tml-slow")
    request_id = tenant.forward_backward(tenant.model(), 1)

    def step() -> float:
        return value(scrape(server.url), "twinkle_compute_step_seconds")

    started = eventually(step)
    for path in ("healthz", "healthz/ready", "twinkle/healthz"):
        assert get(server, path).status_code == 200, path
    eventually(lambda: get(server, "healthz/deep").status_code == 503)
    assert "a step has been running for" in get(server, "twinkle/healthz/deep").json()["models"]["mock"]["detail"]
    assert get(server, "model/mock/healthz").status_code == 503
    assert get(server, "healthz").status_code == 200  # still alive: restarting the server would lose the step
    assert step() > started, "it still runs"
    tenant.result(request_id)
    assert get(server, "healthz/deep").json()["healthy"] is True


def test_not_ready_while_it_recovers(own_server: Callable[..., Server]) -> None:
    server = own_server(**{"pass": 2.0, "snapshot": 1000.0, "progress": 0.1})
    tenant = Tenant(server.url, "tml-recovering")
    tenant.result(tenant.forward_backward(tenant.model(), 1))
    time.sleep(1)  # time to record the end of the pass; without that it would run as new work, not as a replay
    server.kill()
    server.start()
    first = get(server, "healthz/ready")
    assert first.status_code == 503
    assert first.json() == {"ready": False, "detail": "recovering: mock"}
    assert get(server, "healthz").status_code == 200
    eventually(lambda: get(server, "healthz/ready").status_code == 200)
    eventually(lambda: "recovery of mock: done after" in server.log())
    assert re.search(r"recovery of mock: [01] of 2 ops \(\d+ s so far\)", server.log())


class NoModels:
    async def reports(self) -> dict[str, object]:
        return {}


@pytest.mark.parametrize(("stopping", "status"), [(True, 503), (False, 200)])
def test_not_ready_while_it_ends(stopping: bool, status: int) -> None:
    app = make_app(lambda _app: None)  # type: ignore[arg-type,return-value]  # it is never started
    app.state.gateway = SimpleNamespace(stopping=stopping, fleet=NoModels(), config=ServerConfig(auth={"mode": "keys"}))
    assert TestClient(app).get("/api/v1/healthz/ready").status_code == status


class FakeReplica:
    """A replica of a model on Ray that reports, or is gone."""

    def __init__(self) -> None:
        self.answers = False

    async def report(self) -> ModelReport:
        if not self.answers:
            raise ReplicaGoneError
        return ModelReport("m", (), 8, True, True, False, "trains and samples", {}, {}, frozenset())


def test_a_missing_replica_on_ray_is_neither_ready_nor_healthy() -> None:
    """Also one that has never answered, as after the start of a gateway."""
    model = {"name": "m", "import_path": "model", "args": {"model_id": "m", "backend": "mock"}}
    config = ServerConfig.model_validate(
        {"runtime": "ray", "auth": {"mode": "keys"}, "applications": [{**model, "deployments": [{"num_replicas": 2}]}]}
    )
    first, second = FakeReplica(), FakeReplica()
    fleet = RemoteFleet(layout_of(config), {"m-0": first, "m-1": second})  # type: ignore[dict-item]
    app = make_app(lambda _app: None)  # type: ignore[arg-type,return-value]  # it is never started
    app.state.gateway = SimpleNamespace(stopping=False, fleet=fleet, config=config)
    caller = TestClient(app)

    def check(status: int, ready: str, deep: str) -> None:
        answers = caller.get("/api/v1/healthz/ready"), caller.get("/api/v1/healthz/deep")
        assert [answer.status_code for answer in answers] == [status, status]
        assert answers[0].json()["detail"] == ready
        assert answers[1].json()["models"]["m"] == {"healthy": status == 200, "detail": deep}

    check(503, "no replica of m has answered", "none of its replicas has answered")
    first.answers = True
    check(503, "no answer from m-1", "no answer from m-1")
    second.answers = True
    check(200, "serving", "trains and samples")
    first.answers = False  # it was killed
    check(503, "no answer from m-0", "no answer from m-0")


def test_all_is_well(server: Server) -> None:
    models = {"mock": {"healthy": True, "detail": "trains and samples"}}
    assert get(server, "healthz/deep").json() == {"healthy": True, "models": models}
    assert get(server, "healthz/ready").json() == {"ready": True, "detail": "serving"}
