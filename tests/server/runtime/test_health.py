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


def test_all_is_well(server: Server) -> None:
    models = {"mock": {"healthy": True, "detail": "trains and samples"}}
    assert get(server, "healthz/deep").json() == {"healthy": True, "models": models}
    assert get(server, "healthz/ready").json() == {"ready": True, "detail": "serving"}
