"""Adapters beyond the host's memory go to disk and come back, and nobody can tell."""

from collections.abc import Callable
from typing import Any

import httpx
from running import Server, Tenant, datum, mock_config

KIB = 1024
RANK = 8  # the mock's adapters take a kilobyte a rank


def trained(server: Server) -> list[Any]:
    """What two tenants with three adapters each see: windows stay open while others train."""
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
    # All at once, in one batch as far as there is room.
    futures = [(tenant, tenant.forward_backward(model, seq)) for tenant, model in models]
    seen += [tenant.loss(future) for tenant, future in futures]
    return seen


def places(server: Server) -> dict[str, float]:
    lines = httpx.get(f"{server.url}/metrics", trust_env=False).text.splitlines()
    return {line.split('place="')[1].split('"')[0]: float(line.split()[-1]) for line in lines if "place=" in line}


def test_results_are_the_same_with_adapters_on_disk(own_server: Callable[..., Server]) -> None:
    limited = own_server(mock_config(limits={"max_host_adapter_bytes": 2 * RANK * KIB}))
    assert trained(limited) == trained(own_server(mock_config()))
    on_disk = places(limited)
    assert on_disk["disk"] >= 4
    budget = httpx.get(f"{limited.url}/api/v1/status", trust_env=False).json()["budgets"]["host_adapters"]
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
    """The data of another op of this number."""
    return [datum([seq % 97 + n for n in range(6)])]
