"""``limits.adapter_max_lifetime_seconds``: an adapter of that age is evicted, and its client can resume.

tests/clients/twinkle/test_client_limits.py has the same for the native client.
"""

import asyncio
import time
from collections.abc import Callable
from unittest.mock import AsyncMock, MagicMock

import pytest

from tests.support.servers.running import Server, Tenant, datum, mock_config
from twinkle.server.gateway.unloading import Unloading
from twinkle.server.services.training.adapters import LiveAdapters

DATA = [datum([3, 5, 8, 13])]


def config(seconds: float | None) -> dict[str, object]:
    return mock_config(limits={} if seconds is None else {"adapter_max_lifetime_seconds": seconds})


def adapters(tenant: Tenant) -> dict[str, str]:
    listed = tenant.get("twinkle/adapters").json()["adapters"]
    return {each["training_run_id"]: each["where"] for each in listed}


def wait_until_evicted(tenant: Tenant, *models: str) -> None:
    """Wait for the eviction of models, while their client sends heartbeats as SDKs do."""
    deadline = time.monotonic() + 60
    while any(adapters(tenant)[model] != "parked" for model in models):
        assert time.monotonic() < deadline
        for session in {model.partition(":")[0] for model in models}:
            assert tenant.post("session_heartbeat", {"session_id": session}).status_code == 200
        time.sleep(0.1)


def resumed(note: str) -> str:
    """Return the checkpoint from which the error says to continue."""
    return note.partition("_with_optimizer('")[2].partition("'")[0]


def test_tinkers_client_is_told_and_resumes(own_server: Callable[..., Server]) -> None:
    """The session goes on, and the adapter's last state is kept, also over a restart."""
    server = own_server(config(None), housekeeping=0.2)
    tenant = Tenant(server.url, "tml-lifetime")
    model = tenant.model()
    tenant.result(tenant.forward_backward(model, 1, DATA))
    tenant.result(tenant.optim_step(model, 2))
    expected = tenant.loss(tenant.forward_backward(model, 3, DATA))
    assert adapters(tenant)[model] != "parked"  # without the limit it lives as long as its session
    server.kill()
    server.configure(config(1.5))  # the limit also holds for adapters that a restarted server recovers
    server.start()
    wait_until_evicted(tenant, model)
    note = tenant.error(tenant.optim_step(model, 4))
    assert f"{model} is older than an adapter may be (adapter_max_lifetime_seconds: 1.5)" in note
    assert "kept for 7 days" in note
    # The new adapter gets a life of its own.
    server.stop()
    server.configure(config(600))
    server.start()
    again = tenant.model(model.partition(":")[0], 1)
    tenant.json(tenant.load(again, 1, resumed(note)))
    assert tenant.loss(tenant.forward_backward(again, 2, DATA)) == pytest.approx(expected)


def test_accepted_ops_are_executed_first(own_server: Callable[..., Server]) -> None:
    server = own_server(config(1.0), housekeeping=0.1, **{"pass": 0.7})
    tenant = Tenant(server.url, "tml-accepted")
    model = tenant.model()
    sent = []
    for seq in range(1, 7, 2):  # more than the adapter's lifetime
        sent += [tenant.forward_backward(model, seq, DATA), tenant.optim_step(model, seq + 1)]
    wait_until_evicted(tenant, model)
    for each in sent:
        tenant.result(each)
    assert "adapter_max_lifetime_seconds: 1" in tenant.error(tenant.forward_backward(model, 7, DATA))


def test_ops_behind_a_gap_do_not_prolong_it(own_server: Callable[..., Server]) -> None:
    """The missing op is refused when it comes, so that nothing has to wait for it."""
    server = own_server(config(1.0), housekeeping=0.1, **{"pass": 2.5})
    tenant = Tenant(server.url, "tml-gap")
    model = tenant.model()
    first, ahead = tenant.forward_backward(model, 1, DATA), tenant.optim_step(model, 9)
    time.sleep(1.5)
    limit = "adapter_max_lifetime_seconds: 1"
    assert limit in tenant.error(tenant.optim_step(model, 2))
    wait_until_evicted(tenant, model)
    tenant.result(first)
    assert limit in tenant.error(ahead)


def test_a_state_that_cannot_be_saved_is_reported(own_server: Callable[..., Server]) -> None:
    server = own_server(config(0.5), housekeeping=0.1, full_save=1)
    tenant = Tenant(server.url, "tml-full")
    model = tenant.model()
    deadline, seq, note = time.monotonic() + 60, 0, ""
    while "could not be saved as a checkpoint" not in note:
        assert time.monotonic() < deadline, note
        time.sleep(0.2)
        note = tenant.result(tenant.optim_step(model, seq := seq + 1)).decode()
    assert "adapter_max_lifetime_seconds: 0.5" in note
    assert "continue from your last checkpoint" in note


def test_setting_the_clock_ages_no_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only an adapter of an earlier process is aged by the wall clock, when this process adds it."""
    wall, monotonic = 1000.0, 50.0
    monkeypatch.setattr("twinkle.server.services.training.adapters.time.time", lambda: wall)
    monkeypatch.setattr("twinkle.server.services.training.adapters.time.monotonic", lambda: monotonic)
    context, found, begun = MagicMock(), [], []
    adapters = LiveAdapters(context, MagicMock(), MagicMock(), MagicMock(), 2**30)
    for number, created_at in enumerate((1000.0, 400.0, 5000.0)):
        found.append(adapters.add(MagicMock(run_id=f"r{number}", created_at=created_at)))
    assert [adapter.born for adapter in found] == [50.0, -550.0, 50.0]
    wall = 10_000.0  # it is set forward
    gateway = MagicMock(services={"m": MagicMock(training=MagicMock(adapters=adapters))})
    gateway.config.limits.adapter_max_lifetime_seconds = 600.0
    gateway.store.runs.note_live = AsyncMock()
    unloading = Unloading(gateway)
    monkeypatch.setattr(unloading, "_begin", lambda run, _why, **_options: begun.append(run.run_id))
    asyncio.run(unloading.end_lifetimes(60.0))
    assert begun == ["r1"]
