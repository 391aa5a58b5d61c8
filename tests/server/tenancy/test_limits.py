"""Every limit of a tenant, with many requests at once.

Exactly as many are admitted as allowed, and refusals name the limit.
"""

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.support.servers.forked_servers import run_forked
from tests.support.servers.running import (
    MODEL,
    Server,
    Tenant,
    datum,
    environment,
    key_for,
    mock_config,
    sample_body,
    tensor,
    training_body,
)

LIMITS = {
    "max_sessions_per_tenant": 3,
    "max_adapters_per_tenant": 4,
    "max_queued_ops_per_tenant": 8,
    "max_queued_bytes_per_tenant": 100_000,
    "max_training_tokens_per_minute": 1000,
    "max_sampling_tokens_per_minute": 150,
    "max_checkpoint_bytes_per_tenant": 1,
    "max_unfetched_result_bytes": 120_000,
    "max_uploading_bytes_per_tenant": 1_000_000,
    "max_long_polls_per_tenant": 5,
}


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = mock_config(limits=LIMITS, clients={"long_poll_seconds": 2.0})
    server = Server(tmp_path_factory.mktemp("strict"), config).start()
    yield server
    server.close()


@pytest.fixture
def guest(strict: Server, request: pytest.FixtureRequest) -> Tenant:
    return Tenant(strict.url, key_for(request.node.nodeid))


@pytest.fixture
def other(strict: Server, request: pytest.FixtureRequest) -> Tenant:
    return Tenant(strict.url, key_for(f"{request.node.nodeid} other"))


def at_once(tenant: Tenant, path: str, contents: list[dict[str, Any] | bytes]) -> list[httpx.Response]:
    """Post all of them at the same time."""

    async def main() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=None)
        headers = {"X-API-Key": tenant.key}
        base = str(tenant.http.base_url)
        async with httpx.AsyncClient(
            base_url=base, headers=headers, timeout=120, limits=limits, trust_env=False
        ) as http:

            async def post(content: dict[str, Any] | bytes) -> httpx.Response:
                if isinstance(content, bytes):
                    protobuf = {"Content-Type": "application/x-protobuf"}
                    return await http.post(path, content=content, headers=protobuf)
                return await http.post(path, json=content)

            return await asyncio.gather(*map(post, contents))

    return asyncio.run(main())


def split(answers: list[httpx.Response], limit: str) -> list[dict[str, Any]]:
    """Return the bodies of the admitted requests. All others must be refused with the name of the limit."""
    refused = [answer for answer in answers if answer.status_code != 200]
    for answer in refused:
        assert answer.status_code == 429, answer.text
        assert limit in answer.json()["detail"]
        assert int(answer.headers["Retry-After"]) >= 1
    assert refused, "nobody was refused"
    return [answer.json() for answer in answers if answer.status_code == 200]


def test_requests_that_wait(guest: Tenant, other: Tenant) -> None:
    waiting = guest.forward_backward(guest.model(), 2)  # number 1 is missing
    body = {"request_id": waiting}
    answers = at_once(guest, "retrieve_future", [body] * 20)
    assert sorted({answer.status_code for answer in answers}) == [408, 429]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(refused) == 15
    assert all("requests that wait for results: 5 of 5 in use" in answer.json()["detail"] for answer in refused)
    assert other.poll(other.forward_backward(other.model(), 1)).status_code == 200
    assert guest.poll(waiting).status_code == 408, "their places are free again"


def test_sessions(guest: Tenant, other: Tenant) -> None:
    made = split(at_once(guest, "create_session", [{}] * 20), "active sessions: 3 of 3 in use")
    assert len(made) == 3
    assert other.session()
    session = made[0]["session_id"]
    assert guest.post(f"sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None}).status_code == 200
    assert len(split(at_once(guest, "create_session", [{}] * 10), "active sessions")) == 1


def test_a_session_that_is_asked_for_again_is_no_new_one(guest: Tenant) -> None:
    keys = [guest.post("create_session", {}, **{"X-Idempotency-Key": str(n % 3)}) for n in range(9)]
    assert {answer.status_code for answer in keys} == {200}


def test_adapters(guest: Tenant, other: Tenant) -> None:
    session = guest.session()
    lora = {"rank": 8, "seed": 1}
    bodies: list[dict[str, Any] | bytes] = [
        {"session_id": session, "model_seq_id": number, "base_model": MODEL, "lora_config": lora}
        for number in range(25)
    ]
    assert len(split(at_once(guest, "create_model", bodies), "adapters: 4 of 4 in use")) == 4
    assert other.model()


def test_queued_ops_and_the_one_that_they_wait_for(guest: Tenant, other: Tenant) -> None:
    """The first number is missing, so that nothing runs meanwhile."""
    model = guest.model()
    bodies: list[dict[str, Any] | bytes] = [training_body(model, seq) for seq in range(2, 32)]
    taken = split(at_once(guest, "forward_backward", bodies), "queued ops: 8 of 8 in use")
    assert len(taken) == 8
    repeated = int(taken[0]["request_id"].rpartition(":")[2])
    assert guest.forward_backward(model, repeated) == taken[0]["request_id"]  # it is queued already
    assert other.loss(other.forward_backward(other.model(), 1)) > 0
    missing = [seq for seq in range(1, 10_000) if f"{model}:{seq}" not in {each["request_id"] for each in taken}]
    filled: list[str] = []
    for seq in missing:  # fill each gap in turn: the next op of an adapter is always admitted
        filled.append(guest.forward_backward(model, seq))
        guest.result(filled[-1])
        if seq > max(int(each["request_id"].rpartition(":")[2]) for each in taken):
            break
    for each in taken:
        assert guest.loss(each["request_id"]) > 0


def test_bytes_of_queued_ops(guest: Tenant) -> None:
    model = guest.model()
    bodies: list[dict[str, Any] | bytes] = [
        json.dumps({"model_id": model, "seq_id": seq, "adam_params": {}}).encode().ljust(30_000) for seq in range(2, 22)
    ]
    assert len(split(at_once(guest, "optim_step", bodies), "bytes of queued ops: 93072 of 100000")) == 3


def test_training_tokens_a_minute(guest: Tenant, other: Tenant) -> None:
    model = guest.model()
    row = datum(list(range(201)))
    bodies: list[dict[str, Any] | bytes] = [training_body(model, seq, [row]) for seq in range(2, 32)]
    started = time.monotonic()
    answers = at_once(guest, "forward_backward", bodies)
    elapsed = time.monotonic() - started
    taken = split(answers, "training tokens per minute: the limit of 1000 is reached")
    assert 5 <= len(taken) <= 5 + elapsed * 1000 / 60 / 200
    assert other.loss(other.forward_backward(other.model(), 1, [row])) > 0


def test_sampling_tokens_a_minute_and_what_was_not_used_comes_back(guest: Tenant) -> None:
    session = guest.session()
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
    sampler = guest.post("create_sampling_session", body).json()["sampling_session_id"]
    started = time.monotonic()
    # each takes up to 15 tokens
    bodies: list[dict[str, Any] | bytes] = [sample_body(sampler, seq) for seq in range(60)]
    taken = split(at_once(guest, "asample", bodies), "sampling tokens per minute: the limit of 150 is reached")
    sampled = sum(len(guest.tokens(each["request_id"])) + 3 for each in taken)
    assert sampled <= 150 + 15 + (time.monotonic() - started) * 150 / 60


def test_disk_space(guest: Tenant, strict: Server) -> None:
    model = guest.model()
    for save in (guest.save(model, 1, "a"), guest.publish(model, 2)):
        assert "max_checkpoint_bytes_per_tenant" in guest.error(save)
    assert guest.get("checkpoints").json()["checkpoints"] == []
    name = model.replace(":", "-").split("-train")[0]
    assert not [path for path in strict.data_dir.glob("checkpoints/*/*/*/*") if name in str(path)]
    assert guest.loss(guest.forward_backward(model, 3)) > 0  # training continues


def test_results_that_nobody_fetches(guest: Tenant) -> None:
    model = guest.model()
    submitted, seq = [], 1
    while True:
        answer = guest.post("forward_backward", training_body(model, seq, [datum(list(range(7)))]))
        if answer.status_code == 429:
            if "results" in answer.json()["detail"]:
                break
            assert "queued ops" in answer.json()["detail"]
            time.sleep(0.02)
            continue
        submitted.append(answer.json()["request_id"])
        seq += 1
        assert seq < 130, "a result counts more than a kilobyte"
    for request_id in submitted:
        guest.result(request_id)
    assert guest.forward_backward(model, seq)


def test_bodies_on_their_way(guest: Tenant, other: Tenant, strict: Server) -> None:
    """Five clients announce 400 kB and send none of it: two fit, and three are refused at once."""
    head = f"POST /api/v1/forward_backward HTTP/1.1\r\nHost: 127.0.0.1\r\nX-API-Key: {guest.key}\r\n"
    connections = [socket.create_connection(("127.0.0.1", strict.port), timeout=60) for _ in range(5)]
    try:
        for connection in connections:
            connection.sendall(f"{head}Content-Length: 400000\r\n\r\nx".encode())
        refused = waited_for(connections, 3)
        for text in refused.values():
            assert text.startswith("HTTP/1.1 429")
            assert "bytes of requests under way" in text
        model = other.model()
        assert other.loss(other.forward_backward(model, 1)) > 0
        silent = [connection for connection in connections if connection not in refused]
        assert waited_for(silent, 0) == {}
    finally:
        for connection in connections:
            connection.close()
    for _ in range(200):  # a client that disconnects frees its share
        if guest.post("forward_backward", b"x" * 700_000).status_code != 429:
            return
        time.sleep(0.05)
    raise AssertionError("what was not sent still counts")


def waited_for(connections: list[socket.socket], count: int) -> dict[socket.socket, str]:
    """Return the answers, as soon as at least ``count`` connections got one."""
    said: dict[socket.socket, str] = {}
    deadline = time.monotonic() + 60
    for connection in connections:
        connection.setblocking(False)
    while True:
        for connection in connections:
            try:
                said[connection] = said.get(connection, "") + connection.recv(65536).decode()
            except BlockingIOError:
                continue
        if sum("detail" in text for text in said.values()) >= count:
            return said
        assert time.monotonic() < deadline
        time.sleep(0.02)


# --- prices beyond tokens and bytes, and limits for all tenants together ----------------------------------------------


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server on which one tenant, or three small ones, reach a limit at once."""
    config = mock_config(limits={"max_training_tokens_per_minute": 12, "max_queued_bytes": 100_000})
    server = Server(tmp_path_factory.mktemp("tight"), config).start()
    yield server
    server.close()


def test_one_token_with_many_targets_is_charged_for_them(tight: Server) -> None:
    wide = datum((1, 2), target_tokens=tensor([[5] * 1024], "i8"))
    greedy, modest = (Tenant(tight.url, f"tml-{name}") for name in ("greedy", "modest"))
    model = greedy.model()
    greedy.result(greedy.forward_backward(model, 1, [wide]))  # 1 token, priced as 8
    refused = greedy.post("forward_backward", training_body(model, 2, [wide]))
    assert refused.status_code == 429, refused.text
    assert "training tokens per minute: the limit of 12 is reached" in refused.json()["detail"]
    assert 10 <= int(refused.headers["Retry-After"]) <= 60
    model = modest.model()
    for seq in range(1, 9):  # together as expensive as one of the others
        modest.result(modest.forward_backward(model, seq, [datum((1, 2))]))


def padded_step(model: str, seq: int) -> bytes:
    """Return an op that takes 31 kB of memory while it waits."""
    return json.dumps({"model_id": model, "seq_id": seq, "adam_params": {}}).encode().ljust(30_000)


def test_bytes_of_queued_ops_of_all_tenants(tight: Server) -> None:
    """The first number of every tenant is missing. No tenant is near its own limit."""
    tenants = [Tenant(tight.url, f"tml-waiting-{name}") for name in "abc"]
    models = [tenant.model() for tenant in tenants]
    waiting = [
        tenant.submit("optim_step", padded_step(model, 2)) for tenant, model in zip(tenants, models, strict=True)
    ]
    for tenant, model in zip(tenants, models, strict=True):
        refused = tenant.post("optim_step", padded_step(model, 3))
        assert refused.status_code == 503, refused.text
        assert "bytes of queued ops: 93072 of 100000" in refused.json()["detail"]
        assert "max_queued_bytes)" in refused.json()["detail"]
        assert int(refused.headers["Retry-After"]) >= 1
    for tenant, model, request_id in zip(tenants, models, waiting, strict=True):
        tenant.result(tenant.submit("optim_step", padded_step(model, 1)))  # the op that the others wait for is admitted
        tenant.result(request_id)
    tenants[0].result(tenants[0].submit("optim_step", padded_step(models[0], 3)))


# --- limits by tenant -------------------------------------------------------------------------------------------------


def test_a_tenant_may_have_limits_of_its_own(own_server: Callable[..., Server], tmp_path) -> None:
    own = {"max_sessions_per_tenant": 2, "max_adapters_per_tenant": 7}
    sections = {
        "auth": {"mode": "keys"},
        "limits": {"max_sessions_per_tenant": 1, "max_adapters_per_tenant": 3},
        "tenants": {"paying customer": {"weight": 4, "priority": "high", "limits": own}},
    }
    server = own_server(mock_config(**sections), housekeeping=0.2)
    command = ["keys", "create", "-c", server.directory / "config.yaml"]
    names = {"paying customer": 2, "guest": 1}
    for name, sessions in names.items():
        made = run_forked([*command, "--name", name], environment())
        assert made.returncode == 0, made
        tenant = Tenant(server.url, made.stdout.strip())
        deadline, active = time.monotonic() + 60, 0
        while active < sessions:  # key names are read during maintenance
            assert time.monotonic() < deadline, f"{name}: {active}"
            active += tenant.post("create_session", {}).status_code == 200
            time.sleep(0.05)
        assert json.loads(tenant.post("create_session", {}).text)["detail"].startswith("active sessions")
        capacity = tenant.http.get("twinkle/capacity_info", headers={"Twinkle-Authorization": f"Bearer {tenant.key}"})
        assert capacity.json()["max_loras"] == {"paying customer": 7, "guest": 3}[name]
