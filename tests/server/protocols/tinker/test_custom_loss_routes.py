"""Custom losses over HTTP: created once, used by name, kept over a crash, deleted with their session."""

import sqlite3
import time
from contextlib import closing

import numpy as np
import pytest
import torch

from tests.support.losses.traced import call, calls, request
from tests.support.servers.running import Server, Tenant, datum, key_for, mock_config, tensor
from twinkle.server.wire import tinker_pb2 as pb


def squares(logprobs, scale):
    loss = (scale * logprobs**2).sum()
    return loss, {"custom/squares:sum": loss, "custom/first:mean": logprobs[0]}


def body(session_id: str, number: int = 0, function=squares, **ranks: int) -> dict:
    return request(function, {"logprobs": 1, **(ranks or {"scale": 1})}, session_id, number)


def created(tenant: Tenant, session_id: str, number: int = 0) -> str:
    return str(tenant.json(tenant.submit("create_custom_loss", body(session_id, number)))["loss_id"])


def rows(count: int = 2) -> list[pb.Datum]:
    return [datum([n + 1, n + 2, n + 3, n + 4], scale=tensor([1.0, 2.0, float(n)])) for n in range(count)]


def custom(loss_id: str, **more) -> dict:
    config = {"loss_id": pb.LossConfigValue(text=loss_id)}
    return {"loss": "custom", "loss_fn_config_v2": config, **more}


def by_hand(output: pb.ForwardBackwardOutput, count: int) -> float:
    record = output.loss_fn_outputs[0].fields["logprobs"]
    logprobs = torch.tensor(np.frombuffer(record.data, "<f4").reshape(count, 3))
    scales = torch.tensor([[1.0, 2.0, float(n)] for n in range(count)])
    return float((scales * logprobs**2).sum())


def test_create_and_use(tenant: Tenant) -> None:
    session = tenant.session()
    model, loss_id = tenant.model(session), created(tenant, session)
    output = tenant.training(tenant.forward_backward(model, 1, rows(), **custom(loss_id)))
    assert output.metrics["loss:sum"] == pytest.approx(by_hand(output, 2), rel=1e-5)
    assert output.metrics["custom/squares:sum"] == pytest.approx(output.metrics["loss:sum"])
    assert output.metrics["custom/first:mean"] < 0
    assert tenant.json(tenant.optim_step(model, 2))["metrics"]["unclipped_grad_l2:mean"] > 0
    looked = tenant.training(tenant.forward_backward(model, 3, rows(), forward_only=True, **custom(loss_id)))
    assert looked.metrics["loss:sum"] == pytest.approx(by_hand(looked, 2), rel=1e-5)
    # A forward-only pass leaves no gradient.
    assert tenant.json(tenant.optim_step(model, 4))["metrics"]["unclipped_grad_l2:mean"] == 0


def test_one_request_or_two_are_the_same(tenant: Tenant) -> None:
    session = tenant.session()
    loss_id, norms = created(tenant, session), []
    for number, parts in enumerate(([rows(4)], [rows(4)[:1], rows(4)[1:]])):
        model = tenant.model(session, number)
        for seq, part in enumerate(parts, 1):
            tenant.training(tenant.forward_backward(model, seq, part, **custom(loss_id)))
        step = tenant.json(tenant.optim_step(model, len(parts) + 1))
        norms.append(step["metrics"]["unclipped_grad_l2:mean"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_the_same_number_again(tenant: Tenant) -> None:
    session = tenant.session()
    first = tenant.submit("create_custom_loss", body(session))
    assert tenant.submit("create_custom_loss", body(session)) == first
    other = tenant.post("create_custom_loss", {**body(session), "name": "other"})
    assert other.status_code == 400
    assert "custom_loss_seq_id" in other.json()["detail"]
    assert tenant.json(first)["type"] == "create_custom_loss"


def test_a_graph_that_is_none_fails_its_future(tenant: Tenant) -> None:
    session = tenant.session()
    wrong = calls(call("s", "torch.load", "x"), loss="s") | {"session_id": session}
    future = tenant.submit("create_custom_loss", wrong)
    assert "unknown operation 'torch.load'" in tenant.error(future)
    assert tenant.submit("create_custom_loss", wrong) == future
    model = tenant.model(session)
    assert "unknown custom loss" in tenant.error(tenant.forward_backward(model, 1, rows(), **custom(future)))
    assert tenant.post("create_custom_loss", {"session_id": session}).status_code == 400
    assert tenant.post("create_custom_loss", b"x" * 300_000).status_code == 413


def test_mistakes_of_a_pass(tenant: Tenant) -> None:
    session = tenant.session()
    model, loss_id = tenant.model(session), created(tenant, session)
    number = {"loss_id": pb.LossConfigValue(number=3.0)}
    two = {**custom(loss_id)["loss_fn_config_v2"], "beta": pb.LossConfigValue(number=1.0)}
    cases = [
        ([datum()], custom(loss_id), "'scale'"),
        ([datum(scale=tensor([[1.0]] * 3))], custom(loss_id), "rank 2"),
        ([datum(scale=tensor([1.0, 2.0]))], custom(loss_id), "size of tensor"),
        ([datum(scale=tensor([1.0, float("nan"), 1.0]))], custom(loss_id), "nan"),
        (rows(), custom(f"{session}:loss:7"), "unknown custom loss"),
        (rows(), custom("nonsense"), "unknown custom loss"),
        (rows(), {"loss": "custom"}, "loss_id"),
        (rows(), {"loss": "custom", "loss_fn_config_v2": number}, "loss_id"),
        (rows(), {"loss": "custom", "loss_fn_config_v2": two}, "loss_id"),
    ]
    for seq, (data, fields, text) in enumerate(cases, 1):
        assert text in tenant.error(tenant.forward_backward(model, seq, data, **fields))
    assert "was not applied" in tenant.error(tenant.optim_step(model, len(cases) + 1))
    tenant.training(tenant.forward_backward(model, len(cases) + 2, rows(), **custom(loss_id)))


def test_a_failing_loss_fails_alone(tenant: Tenant, other_tenant: Tenant) -> None:
    """Both ops are queued together; the good one has the same result as alone."""
    results = []
    for alone in (True, False):
        session = tenant.session()
        model, loss_id = tenant.model(session), created(tenant, session)
        if not alone:
            theirs = other_tenant.session()
            bad = other_tenant.forward_backward(
                other_tenant.model(theirs),
                1,
                [datum(scale=tensor([1.0, 2.0]))],
                **custom(created(other_tenant, theirs)),
            )
        results.append(tenant.result(tenant.forward_backward(model, 1, rows(), **custom(loss_id))))
    assert "error" not in str(results[0])
    assert results[0] == results[1]
    assert "size of tensor" in other_tenant.error(bad)


def test_losses_belong_to_their_session(tenant: Tenant, other_tenant: Tenant) -> None:
    session = tenant.session()
    loss_id = created(tenant, session)
    for owner in (tenant, other_tenant):
        model = owner.model()
        assert "unknown custom loss" in owner.error(owner.forward_backward(model, 1, rows(), **custom(loss_id)))
    assert other_tenant.poll(loss_id).status_code == 404
    assert other_tenant.poll(loss_id).text.replace(loss_id, "") == tenant.poll("x:loss:0").text.replace("x:loss:0", "")


def test_a_crash_between_creating_and_using_and_under_way(own_server) -> None:
    server: Server = own_server(None, **{"pass": 0.2})
    tenant = Tenant(server.url, key_for("crash"))
    session = tenant.session()
    model, loss_id, unused = tenant.model(session), created(tenant, session), created(tenant, session, 1)
    first, step = tenant.forward_backward(model, 1, rows(), **custom(loss_id)), tenant.optim_step(model, 2)
    expected = tenant.result(first), tenant.result(step)
    under_way = [tenant.forward_backward(model, seq, rows(), **custom(loss_id)) for seq in (3, 4)]
    server.kill()
    server.start()
    assert tenant.json(unused)["loss_id"] == unused
    assert (tenant.result(first), tenant.result(step)) == expected
    after = [*under_way, tenant.forward_backward(model, 5, rows(), **custom(unused)), tenant.optim_step(model, 6)]
    undisturbed = tenant.model(session, 1)
    tenant.forward_backward(undisturbed, 1, rows(), **custom(loss_id))
    tenant.optim_step(undisturbed, 2)
    again = [tenant.forward_backward(undisturbed, seq, rows(), **custom(loss_id)) for seq in (3, 4, 5)]
    again.append(tenant.optim_step(undisturbed, 6))
    assert [tenant.result(future) for future in after] == [tenant.result(future) for future in again]


def test_they_go_with_their_session(own_server) -> None:
    server: Server = own_server(mock_config(limits={"max_custom_losses_per_tenant": 2}), housekeeping=0.1)
    tenant = Tenant(server.url, key_for("quota"))
    session = tenant.session()
    for number in range(2):
        created(tenant, session, number)
    full = tenant.post("create_custom_loss", body(session, 2))
    assert full.status_code == 429
    assert "custom losses" in full.json()["detail"]
    created(tenant, session, 1)  # it exists already
    assert created(Tenant(server.url, key_for("another")), Tenant(server.url, key_for("another")).session())
    tenant.post(f"sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None})
    assert tenant.post("create_custom_loss", body(session, 0)).status_code == 400
    fresh = tenant.session()
    deadline = time.monotonic() + 120
    while tenant.post("create_custom_loss", body(fresh)).status_code == 429:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    if server.database is None:
        with closing(sqlite3.connect(server.data_dir / "state.db")) as database:
            assert database.execute("select count(*) from custom_losses where session_id=?", (session,)).fetchone() == (
                0,
            )


def test_clients_are_told(tenant: Tenant) -> None:
    assert tenant.post("client/config", {}).json()["custom_loss_server_side"] is True
