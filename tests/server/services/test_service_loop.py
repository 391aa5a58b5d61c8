"""A service loop that ends because of a bug is noticed at once: in the log, in health checks, by the server's exit."""

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from tests.support.servers.running import RUNTIME, Server, Tenant
from twinkle.server.app import make_app
from twinkle.server.backends.compute_thread import Compute
from twinkle.server.backends.mock import MockSampler, MockTrainer
from twinkle.server.services.sampling.sampler_service import SamplerService
from twinkle.server.services.service_loop import ServiceLoop
from twinkle.server.state.files.data_dir import DataDir


async def _raise() -> None:
    raise ZeroDivisionError("a bug")


async def _wait(told: asyncio.Event) -> None:
    await told.wait()


def test_a_bug_is_told_and_the_end_is_not_raised(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        loop = ServiceLoop("training on m")
        assert not loop.alive
        loop.start(_raise())
        assert loop.alive
        assert await loop.broken() == "training on m"
        assert (loop.alive, loop.failed) == (False, True)
        await loop.ended()

    asyncio.run(scenario())
    (record,) = [record for record in caplog.records if record.levelno == logging.CRITICAL]
    assert "training on m has stopped" in record.getMessage()
    assert record.exc_info is not None
    assert "a bug" in str(record.exc_info[1])


def test_a_loop_that_was_told_to_end_is_not_broken(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        loop, told = ServiceLoop("sampling"), asyncio.Event()
        await loop.ended()  # it never started
        loop.start(_wait(told))
        broken = asyncio.create_task(loop.broken())
        told.set()
        await loop.ended()
        await asyncio.sleep(0)
        assert (loop.alive, loop.failed, broken.done()) == (False, False, False)
        broken.cancel()

    asyncio.run(scenario())
    assert not caplog.records


def test_a_sampler_that_breaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        compute = Compute()
        service = SamplerService(MockSampler(MockTrainer()), compute, DataDir(tmp_path))
        monkeypatch.setattr(service, "_give_orders", lambda: 1 / 0)
        await service.start()
        service.sweep(0.0)  # a turn is due
        assert await asyncio.wait_for(service.loop.broken(), 10) == "sampling"
        assert not service.loop.alive
        await service.stop()
        compute.close()

    asyncio.run(scenario())


def loop_of(*, alive: bool, failed: bool = False) -> SimpleNamespace:
    return SimpleNamespace(loop=SimpleNamespace(alive=alive, failed=failed))


@pytest.mark.parametrize(
    ("training", "sampling", "stopping", "status"),
    [
        (loop_of(alive=True), loop_of(alive=True), False, 200),
        (loop_of(alive=True), None, False, 200),
        (loop_of(alive=False, failed=True), loop_of(alive=True), False, 503),
        (loop_of(alive=True), loop_of(alive=False, failed=True), False, 503),
        (loop_of(alive=False, failed=True), None, True, 503),  # the server ends because of the failure
        (loop_of(alive=False), loop_of(alive=False), True, 200),  # the server ends
    ],
)
def test_health(training: Any, sampling: Any, stopping: bool, status: int) -> None:
    app = make_app(lambda _app: None)  # type: ignore[arg-type,return-value]  # it is never started
    services = {"m": SimpleNamespace(training=training, sampling=sampling)}
    app.state.gateway = SimpleNamespace(stopping=stopping, services=services)
    for path in ("healthz", "twinkle/healthz"):
        answer = TestClient(app).get(f"/api/v1/{path}")
        assert answer.status_code == status
        assert ("has stopped" in answer.text) == (status == 503)


@pytest.mark.skipif(RUNTIME == "ray", reason="there Serve ends the process, and starts another")
def test_a_server_whose_training_breaks_ends_and_the_next_one_does_what_was_accepted(own_server: Any) -> None:
    server: Server = own_server(bug=2)  # in the second batch; the first creates the adapter
    tenant = Tenant(server.url, "tml-unlucky")
    model = tenant.model()
    body = tenant.forward_backward(model, 1)
    assert server.process.wait(120) == 1
    said = server.log()
    assert "CRITICAL" in said
    assert "training on mock has stopped because of an internal error" in said
    assert "Traceback" in said
    assert "a bug" in said
    last = said.strip().splitlines()[-1]
    assert last.startswith("twinkle-server: training on mock stopped by an error")
    with pytest.raises(httpx.HTTPError):
        tenant.get("healthz")
    server.tuning.clear()
    server.start()
    assert tenant.loss(body) > 0
    assert tenant.json(tenant.optim_step(model, 2)) is not None
