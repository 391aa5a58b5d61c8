"""A session ends while its ops run: every waiting client gets an answer, and finished work is kept."""

import json
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.servers.running import Server, Tenant, datum, mock_config

PASS = 0.05
ROW = [datum(range(10))]
FINISHED = {"reason": {"type": "success"}, "detail": None}


@pytest.fixture(scope="module")
def slow_server(tmp_path_factory: pytest.TempPathFactory):
    """A server whose passes take a while and which soon notices silence."""
    limits = {"session_timeout_seconds": 2.0}
    tuning = {"pass": PASS, "housekeeping": 0.2, "snapshot": 0.1}
    server = Server(tmp_path_factory.mktemp("slow"), mock_config(limits=limits), **tuning).start()
    yield server
    log = server.log()
    assert server.stop() == 0
    for text in ("Traceback", "ERROR", "never retrieved"):
        assert text not in log, log


@pytest.fixture
def tenant(slow_server: Server, request: pytest.FixtureRequest) -> Tenant:
    return Tenant(slow_server.url, f"tml-{request.node.name}")


def finish(tenant: Tenant, session: str) -> None:
    answer = tenant.post(f"sessions/{session}/finish", FINISHED)
    assert answer.status_code == 200, answer.text


def long_polls(tenant: Tenant, requests: list[str], meanwhile: Callable[[], None]) -> list[bytes]:
    """Poll for each request on its own connection, call ``meanwhile`` while they wait, and return the results."""
    with ThreadPoolExecutor(len(requests)) as pool:
        waiting = [pool.submit(tenant.result, request, 20) for request in requests]
        time.sleep(0.05)
        meanwhile()
        return [one.result(timeout=120) for one in waiting]


def failed(result: bytes) -> bool:
    return result.startswith(b'{"error"')


@pytest.mark.parametrize("delay", [0.0, PASS / 2, PASS * 2.5])
def test_all_long_polls_are_answered(tenant: Tenant, delay: float) -> None:
    session = tenant.session()
    model = tenant.model(session)
    requests = []
    for seq in range(1, 21, 2):
        requests += [tenant.forward_backward(model, seq), tenant.optim_step(model, seq + 1)]
    requests += [tenant.save(model, 21, "ck"), tenant.publish(model, 22), tenant.forward_backward(model, 30)]

    def end() -> None:
        time.sleep(delay)
        finish(tenant, session)

    results = long_polls(tenant, requests, end)
    done = [not failed(result) for result in results]
    assert done == sorted(done, reverse=True), "ops end in order"
    assert not done[-1], "it waits behind a gap"
    path = f"tinker://{model}/weights/parked"
    for result in results[sum(done) :]:
        assert json.loads(result)["category"] == "user"
        assert path in json.loads(result)["error"]
    # The saved state contains exactly the acknowledged steps.
    again, reference = tenant.model(), tenant.model()
    tenant.json(tenant.load(again, 1, path))
    steps = sum(done[1:20:2])
    for seq in range(1, 2 * steps, 2):
        tenant.forward_backward(reference, seq)
        tenant.optim_step(reference, seq + 1)
    kept = tenant.forward_backward(again, 2, ROW, forward_only=True)
    expected = tenant.forward_backward(reference, 2 * steps + 1, ROW, forward_only=True)
    assert tenant.result(kept) == tenant.result(expected)


def test_saves_and_loads_that_run_while_it_ends(tenant: Tenant) -> None:
    """Ops that run when the session ends are finished; none fails because of the server or waits forever."""
    source = tenant.model()
    path = tenant.json(tenant.save(source, 1, "source"))["path"]
    chance = random.Random(0)
    for number in range(12):
        session = tenant.session()
        model = tenant.model(session)
        kinds = [
            lambda model, seq: tenant.save(model, seq, f"ck{seq}"),
            lambda model, seq: tenant.load(model, seq, path),
            lambda model, seq: tenant.publish(model, seq, seq),
            lambda model, seq: tenant.optim_step(model, seq),
        ]
        requests = [chance.choice(kinds)(model, seq) for seq in range(1, 7)]
        time.sleep(chance.random() * 0.02)
        finish(tenant, session)
        for result in (json.loads(tenant.result(request, 10)) for request in requests):
            assert "error" not in result or (result["category"] == "user" and "parked" in result["error"]), number
        tenant.json(tenant.load(tenant.model(), 1, f"tinker://{model}/weights/parked"))


def test_what_is_kept_replaces_nothing(tenant: Tenant) -> None:
    """A tenant may have given its own checkpoint that name."""
    session = tenant.session()
    model = tenant.model(session)
    own = tenant.json(tenant.save(model, 1, "parked"))["path"]
    before = tenant.get("checkpoints").json()["checkpoints"]
    tenant.result(tenant.forward_backward(model, 2))
    finish(tenant, session)
    assert [one for one in tenant.get("checkpoints").json()["checkpoints"] if one["tinker_path"] == own] == before
    assert f"{own}-2" in tenant.error(tenant.optim_step(model, 3))
    tenant.json(tenant.load(tenant.model(), 1, f"{own}-2"))


def test_finishing_twice_at_once(tenant: Tenant) -> None:
    session = tenant.session()
    models = [tenant.model(session, number) for number in range(3)]
    requests = [tenant.forward_backward(model, 1) for model in models]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: finish(tenant, session), range(4))) == [None] * 4
    listed = tenant.get("checkpoints").json()["checkpoints"]
    assert sorted(one["tinker_path"] for one in listed) == sorted(f"tinker://{m}/weights/parked" for m in models)
    assert all(tenant.result(request, 10) for request in requests)


def test_a_new_model_in_a_session_that_ends(tenant: Tenant) -> None:
    """Whether it is created before, during or after the end: it works until it is evicted, or it is refused."""
    for delay in (0.0, 0.002, 0.005):
        session = tenant.session()
        body = {"session_id": session, "model_seq_id": 0, "base_model": "mock", "lora_config": {"rank": 8, "seed": 1}}
        with ThreadPoolExecutor(1) as pool:
            creating = pool.submit(tenant.post, "create_model", body)
            time.sleep(delay)
            finish(tenant, session)
            answer = creating.result()
        if answer.status_code == 200:
            result = json.loads(tenant.result(answer.json()["request_id"], 10))
            assert result.get("category", "user") == "user"
            assert tenant.error(tenant.optim_step(f"{session}:train:0", 1))
        else:
            assert answer.status_code == 400
            assert "session_id" in answer.json()["detail"]


def test_silence_ends_a_session(tenant: Tenant) -> None:
    silent, lively = tenant.session(), tenant.session()
    model, other = tenant.model(silent), tenant.model(lively)
    delivered = tenant.result(tenant.forward_backward(model, 1))
    deadline = time.monotonic() + 120
    while tenant.get("checkpoints").json()["cursor"]["total_count"] == 0:
        assert tenant.post("session_heartbeat", {"session_id": lively}).status_code == 200
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert tenant.post("session_heartbeat", {"session_id": silent}).status_code == 410
    assert f"tinker://{model}/weights/parked" in tenant.error(tenant.optim_step(model, 2))
    assert tenant.result(f"{model}:1") == delivered
    refused = tenant.post("create_sampling_session", {"session_id": silent, "sampling_session_seq_id": 0})
    assert refused.status_code == 400
    assert "expired" in refused.json()["detail"]
    assert "metrics" in tenant.json(tenant.optim_step(other, 1))
