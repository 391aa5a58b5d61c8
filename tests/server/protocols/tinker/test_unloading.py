"""unload_model: an adapter is evicted when its client asks for it, after all earlier ops."""

import json
import time
from collections.abc import Callable

from tests.support.servers.native_caller import Caller
from tests.support.servers.running import Server, Tenant, datum
from twinkle.server.ids import UNLOAD_NUMBER


def unload(tenant: Tenant, model: str) -> str:
    return tenant.submit("unload_model", {"model_id": model, "type": "unload_model"})


def resumed(note: str) -> str:
    """Return the checkpoint from which the error says to continue."""
    return note.partition("_with_optimizer('")[2].partition("'")[0]


def test_what_was_asked_before_is_done_first(own_server: Callable[..., Server]) -> None:
    server = own_server(**{"pass": 0.2})
    tenant = Tenant(server.url, "tml-unloading")
    session = tenant.session()
    model, twin = tenant.model(session, 0), tenant.model(session, 1)
    before = []
    for seq in (1, 3):
        for one in (model, twin):
            before += [tenant.forward_backward(one, seq), tenant.optim_step(one, seq + 1)]
    request_id = unload(tenant, model)
    assert request_id == f"{model}:{UNLOAD_NUMBER}"
    assert unload(tenant, model) == request_id  # a client that missed the first answer
    assert tenant.json(request_id) == {"model_id": model, "type": "unload_model"}
    for each in before:
        tenant.result(each)
    assert tenant.json(unload(tenant, model)) == {"model_id": model, "type": "unload_model"}

    # Its last state is kept, and the error names it to clients that want to continue.
    note = tenant.error(tenant.forward_backward(model, 5))
    assert "unloaded by its client" in note
    again = tenant.model(session, 2)
    tenant.json(tenant.load(again, 1, resumed(note)))
    data = [datum([3, 5, 8, 13])]
    one, other = tenant.forward_backward(again, 2, data), tenant.forward_backward(twin, 5, data)
    assert tenant.loss(one) == tenant.loss(other)


def test_room_for_another(tenant: Tenant) -> None:
    session = tenant.session()
    model = tenant.model(session, 0)
    assert tenant.get("twinkle/capacity_info").json()["used_loras"] == 1
    tenant.json(unload(tenant, model))
    assert tenant.get("twinkle/capacity_info").json()["used_loras"] == 0
    tenant.model(session, 1)  # the session stays active


def test_a_restart_does_not_forget_it(own_server: Callable[..., Server]) -> None:
    server = own_server(**{"pass": 5.0})
    tenant = Tenant(server.url, "tml-restart")
    polled, left = tenant.model(), tenant.model()
    for model in (polled, left):
        tenant.forward_backward(model, 1)
        request_id = unload(tenant, model)
    assert request_id == f"{left}:{UNLOAD_NUMBER}"
    server.kill()  # in the middle of the pass
    server.tuning["pass"] = 0.0
    server.start()
    assert tenant.json(f"{polled}:{UNLOAD_NUMBER}")["model_id"] == polled
    # This also happens if no client waits for it.
    deadline = time.monotonic() + 60
    while where(tenant, left) != "parked":
        assert time.monotonic() < deadline
        time.sleep(0.05)


def where(tenant: Tenant, model: str) -> str:
    listed = tenant.get("twinkle/adapters").json()["adapters"]
    return next(each["where"] for each in listed if each["training_run_id"] == model)


def test_what_nobody_asked_for(tenant: Tenant) -> None:
    model = tenant.model()
    assert tenant.poll(f"{model}:{UNLOAD_NUMBER}").status_code == 404
    assert tenant.loss(tenant.forward_backward(model, 1)) > 0


def test_models_of_the_other_protocol_are_not_unloaded(server: Server, tenant: Tenant) -> None:
    native = Caller(server.url, tenant.key)
    native.begin()
    config = json.dumps({"r": 4, "target_modules": "all-linear"})
    body = {"adapter_name": "a", "config": config}
    added = native.http.post("model/mock/twinkle/add_adapter_to_model", json=body)
    assert added.status_code == 200, added.text
    answer = tenant.post("unload_model", {"model_id": added.json()["adapter_name"]})
    assert answer.status_code == 400
    assert "not of the native client" in answer.json()["detail"]
