"""Adapters that exceed the host's memory are offloaded to disk and loaded again, without any effect on results."""

import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.support.servers.running import MODEL, Server, Tenant, datum, mock_config
from tests.support.servers.state_samples import run
from twinkle.errors import OverloadedError
from twinkle.model.types import LoraSpec
from twinkle.server.backends.mock import MockTrainer
from twinkle.server.services.training.adapters import AdapterMemory, LiveAdapter, Place

KIB = 1024
RANK = 8  # an adapter of the mock takes a kilobyte for each rank


def trained(server: Server) -> list[Any]:
    """Return everything that two tenants with three adapters each observe. Windows stay open while others train."""
    tenants = [Tenant(server.url, f"tml-{name}") for name in "ab"]
    models = [(tenant, tenant.model(number=number, seed=number)) for tenant in tenants for number in range(3)]
    seen: list[Any] = []
    seq = 1
    for _ in range(3):
        for tenant, model in models:
            seen.append(tenant.loss(tenant.forward_backward(model, seq)))
        for tenant, model in models:
            seen.append(tenant.loss(tenant.forward_backward(model, seq + 1)))
        for tenant, model in models:
            seen.append(tenant.json(tenant.optim_step(model, seq + 2))["metrics"])
        seq += 3
    # All at once, in one batch if there is room.
    futures = [(tenant, tenant.forward_backward(model, seq)) for tenant, model in models]
    seen += [tenant.loss(future) for tenant, future in futures]
    return seen


def places(server: Server) -> dict[str, float]:
    lines = httpx.get(f"{server.url}/metrics", trust_env=False).text.splitlines()
    return {line.split('place="')[1].split('"')[0]: float(line.split()[-1]) for line in lines if "place=" in line}


def host_budget(server: Server) -> dict[str, int]:
    """Return how many bytes of adapters are in host memory, and how many are allowed."""
    status = httpx.get(f"{server.url}/api/v1/status", trust_env=False).json()
    budget: dict[str, int] = status["budgets"]["host_adapters"]
    return budget


def test_results_are_the_same_with_adapters_on_disk(own_server: Callable[..., Server]) -> None:
    limited = own_server(mock_config(limits={"max_host_adapter_bytes": 2 * RANK * KIB}))
    assert trained(limited) == trained(own_server(mock_config()))
    on_disk = places(limited)
    assert on_disk["disk"] >= 4
    budget = host_budget(limited)
    assert budget["used"] <= budget["limit"] == 2 * RANK * KIB


def test_adapters_on_disk_survive_the_server_and_can_be_saved(own_server: Callable[..., Server]) -> None:
    server = own_server(mock_config(limits={"max_host_adapter_bytes": RANK * KIB}))
    tenant = Tenant(server.url, "tml-a")
    models = [tenant.model(number=number, seed=number) for number in range(3)]
    losses = []
    for model in models:
        tenant.result(tenant.forward_backward(model, 1))
        tenant.result(tenant.optim_step(model, 2))
        losses.append(tenant.loss(tenant.forward_backward(model, 3)))
    server.kill()
    server.start()
    for model, loss in zip(models, losses, strict=True):
        assert tenant.loss(tenant.forward_backward(model, 4, fields_of(3))) == loss
        assert tenant.json(tenant.save(model, 5, "kept"))["path"]


def fields_of(seq: int) -> Any:
    """Return the default data of the op with this number."""
    return [datum([seq % 97 + n for n in range(6)])]


# --- when no adapter can be offloaded ---------------------------------------------------------------------------------


def test_no_more_adapters_are_taken_while_none_can_leave() -> None:
    trainer = MockTrainer()
    memory = AdapterMemory(trainer, RANK * KIB)
    adapters = [LiveAdapter(run(number), Place.TRAINER, used_at=number) for number in (1, 2)]
    for adapter in adapters:
        trainer.create_adapter(adapter.run.run_id, LoraSpec(RANK))
    memory.check()  # too much is in memory, and no offload was tried yet
    assert memory.next_to_leave(adapters, lambda _: False) is None
    with pytest.raises(OverloadedError, match=r"16384 of 8192 .*max_host_adapter_bytes"):
        memory.check()
    assert memory.next_to_leave(adapters, lambda _: True) is adapters[0]
    memory.check()
    assert memory.next_to_leave(adapters, lambda _: False) is None
    trainer.remove_adapter(adapters[0].run.run_id)  # the rest fits
    memory.check()


def test_adapters_are_taken_again_when_those_that_could_not_leave_can(own_server: Callable[..., Server]) -> None:
    """Both adapters are being saved when too much is in memory, and no request arrives afterwards."""
    server = own_server(mock_config(limits={"max_host_adapter_bytes": RANK * KIB}), save=2.0)
    tenant, other = Tenant(server.url, "tml-a"), Tenant(server.url, "tml-b")
    models = [tenant.model(number=number, seed=number) for number in range(2)]
    saves = [tenant.save(model, 1, "kept") for model in models]
    body = {"session_id": other.session(), "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": RANK}}
    deadline = time.monotonic() + 120
    while host_budget(server)["used"] <= RANK * KIB:  # wait until both are in memory
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.2)  # wait until the server has noticed that neither can be offloaded
    refused = other.post("create_model", body)
    assert refused.status_code == 503
    assert "max_host_adapter_bytes" in refused.json()["detail"]
    assert int(refused.headers["Retry-After"]) >= 1
    for save in saves:
        assert tenant.json(save)["path"]
    deadline = time.monotonic() + 120
    while other.post("create_model", body).status_code != 200:
        assert time.monotonic() < deadline, "idle adapters still count as unable to leave"
        time.sleep(0.1)
