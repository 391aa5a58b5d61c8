"""An op that kills the server is run twice and then never again, and costs other tenants nothing."""

import json
from collections.abc import Callable

from tests.support.servers.running import Server, Tenant, datum

POISON = 13_131  # a pass with this token kills the process


def results(tenant: Tenant, requests: list[str]) -> list[bytes]:
    return [tenant.result(request) for request in requests]


def train(tenant: Tenant, model: str) -> list[str]:
    steps = [(tenant.forward_backward(model, 2 * i + 1), tenant.optim_step(model, 2 * i + 2)) for i in range(4)]
    return [request for step in steps for request in step]


def test_the_third_start_is_up_and_all_others_lost_nothing(own_server: Callable[..., Server]) -> None:
    server = own_server(poison=POISON, snapshot=60.0, **{"pass": 0.2})
    culprit, innocent = Tenant(server.url, "tml-culprit"), Tenant(server.url, "tml-innocent")
    models = [innocent.model() for _ in range(3)]
    bad = culprit.model()
    requests = [train(innocent, model) for model in models]
    good = culprit.forward_backward(bad, 1)
    poison = culprit.forward_backward(bad, 2, [datum([1, POISON, 2])])
    assert server.process is not None
    assert server.process.wait(120) == -9
    server.spawn()
    assert server.process.wait(120) == -9
    server.start()

    outcome = json.loads(culprit.result(poison))
    assert outcome["category"] == "server"
    assert outcome["error"] == f"request {poison}: the server died twice while running it; it was not run again"
    assert culprit.loss(good) > 0
    assert "forward_backward 2 " in culprit.error(culprit.optim_step(bad, 3))
    assert culprit.loss(culprit.forward_backward(bad, 4)) > 0
    assert culprit.json(culprit.optim_step(bad, 5))["metrics"]["unclipped_grad_l2:mean"] > 0
    expected = results(innocent, train(innocent, innocent.model()))
    for of_model in requests:
        assert results(innocent, of_model) == expected

    assert server.stop() == 0
    server.start()  # a second time: no later start runs it either
    assert json.loads(culprit.result(poison)) == outcome


def test_slow_ops_count_too(own_server: Callable[..., Server]) -> None:
    server = own_server(poison_save=1.0)
    tenant = Tenant(server.url, "tml-saves")
    model = tenant.model()
    tenant.result(tenant.forward_backward(model, 1))
    poison = tenant.save(model, 2, "poison")
    assert server.process is not None
    assert server.process.wait(120) == -9
    server.spawn()
    assert server.process.wait(120) == -9
    server.start()
    assert "died twice" in json.loads(tenant.result(poison))["error"]
    assert tenant.json(tenant.optim_step(model, 3))["metrics"]["unclipped_grad_l2:mean"] > 0


def test_a_clean_end_is_no_death(own_server: Callable[..., Server]) -> None:
    server = own_server(**{"pass": 0.5})
    tenant = Tenant(server.url, "tml-patient")
    model = tenant.model()
    for seq in (1, 2, 3):
        request = tenant.forward_backward(model, seq)
        assert server.stop() == 0
        server.start()
        assert tenant.loss(request) > 0
    assert "died" not in server.log()
