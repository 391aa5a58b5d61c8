"""Sessions, retries, errors and heartbeats, over real sockets."""

import logging
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

from tests.clients.twinkle.stub_server import SESSION, Cut, Drop, Slow, Status
from twinkle_client import (
    AuthenticationError,
    ConnectionLostError,
    DeviceGroup,
    GoneError,
    InvalidRequestError,
    LimitError,
    NotFoundError,
    ServerError,
    SessionLostError,
    TwinkleClient,
    TwinkleClientError,
    default_client,
    init_twinkle_client,
    initialize,
    shutdown,
)
from twinkle_client.client import current, log_lines, transport
from twinkle_client.client.json_body import encode
from twinkle_client.client.retries import Backoff, RetryPolicy, retry_after_seconds
from twinkle_client.client.transport import with_api

CAPABILITIES = "/twinkle/get_server_capabilities"
MODELS = {"supported_models": [{"model_name": "m"}]}


def wait_until(condition, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


# --- sessions ---------------------------------------------------------------------------------------------------------


def test_a_session_is_opened_kept_alive_and_finished(stub):
    with TwinkleClient(stub.url, "my-token", 0.05, session_metadata={"team": "a"}) as client:
        assert client.session_id == SESSION
        wait_until(lambda: len(stub.asked("/twinkle/session_heartbeat")) >= 3)
    assert stub.bodies("/twinkle/create_session") == [{"metadata": {"team": "a"}}]
    assert stub.bodies("/twinkle/session_heartbeat")[0] == {"session_id": SESSION}
    assert stub.bodies("/twinkle/finish_session") == [{"session_id": SESSION}]
    created, finished = stub.asked("/twinkle/create_session")[0], stub.asked("/twinkle/finish_session")[0]
    assert created.headers["authorization"] == created.headers["twinkle-authorization"] == "Bearer my-token"
    assert "x-twinkle-session-id" not in created.headers
    assert finished.headers["x-twinkle-session-id"] == SESSION
    before = len(stub.requests)
    time.sleep(0.15)
    assert len(stub.requests) == before  # heartbeats have stopped
    with pytest.raises(InvalidRequestError, match="closed"):
        client.get_server_capabilities()


def test_other_servers_cannot_finish_sessions(stub):
    del stub.answers["/twinkle/finish_session"]
    TwinkleClient(stub.url).close()
    assert len(stub.asked("/twinkle/finish_session")) == 1


def test_address_and_token_come_from_the_environment(stub, monkeypatch):
    monkeypatch.setenv("TWINKLE_SERVER_URL", stub.url + "/api/v1/")
    with init_twinkle_client() as client:
        assert default_client() is client
        assert client.base_url == stub.url + "/api/v1"
        assert client.api_key == "EMPTY_TOKEN"
    monkeypatch.setenv("TWINKLE_SERVER_TOKEN", "from-outside")
    with initialize(seed=7, name="script") as client:
        assert default_client() is client
        assert client.api_key == "from-outside"
        assert client.seed == 7
    assert stub.bodies("/twinkle/create_session") == [{"metadata": None}, {"metadata": {"name": "script"}}]


@pytest.mark.parametrize("given", ["http://h:8000", "http://h:8000/", "http://h:8000/api/v1", "http://h:8000/api/v1/"])
def test_addresses_with_and_without_the_prefix(given):
    assert with_api(given) == "http://h:8000/api/v1"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mode": "cloud"}, "mode: got 'cloud'"),
        ({"full_determinism": True}, "full_determinism"),
        ({"notifier": object()}, "notifier"),
        ({"seed": -1}, "seed: got -1"),
    ],
)
def test_initialize_refuses_what_a_server_cannot_do(given, message):
    with pytest.raises(InvalidRequestError, match=message):
        initialize(**given)


def test_a_script_on_a_server_is_one_process(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InvalidRequestError, match="WORLD_SIZE: got 2"):
        initialize()


def test_initialize_uses_the_client_that_was_made_for_it(stub, caplog):
    log_lines._log_once.cache_clear()
    groups = [DeviceGroup("model", 2, "cuda")]
    with caplog.at_level(logging.INFO, "twinkle_client"), init_twinkle_client(stub.url, "mine") as client:
        assert initialize("ray", groups=groups, seed=7) is client
        drawn = random.random(), np.random.rand()
        assert initialize("ray", groups=groups, seed=7) is client  # again the same server
        assert (random.random(), np.random.rand()) == drawn
        assert client.seed == 7
    assert len(stub.bodies("/twinkle/create_session")) == 1
    assert caplog.text.count("initialize: the server decides about groups, mode") == 1


def test_the_variable_is_enough(stub, monkeypatch):
    monkeypatch.setattr(current, "_default", None)
    with pytest.raises(InvalidRequestError, match="TWINKLE_SERVER_URL"):
        default_client()
    monkeypatch.setenv("TWINKLE_SERVER_URL", stub.url)
    with default_client() as client:
        assert client is default_client()


def test_shutdown_ends_the_session(stub):
    client = init_twinkle_client(stub.url)
    shutdown()
    assert client.closed
    shutdown()


def test_a_lost_session_is_said_once_and_stops_requests(stub, caplog):
    stub.fail("/twinkle/session_heartbeat", Status(404, {"detail": "Unknown session"}))
    with caplog.at_level(logging.WARNING, "twinkle_client"), TwinkleClient(stub.url, "t", 0.02) as client:
        wait_until(lambda: "is gone" in caplog.text)
        time.sleep(0.1)
        with pytest.raises(SessionLostError, match=r"Unknown session.*resume_from_checkpoint"):
            client.post("/model/m/twinkle/step", b"{}")
        # runs and checkpoints outlive the session
        stub.answer("/twinkle/training_runs/r/checkpoints", {"checkpoints": []})
        assert client.list_checkpoints("r") == []
    assert caplog.text.count("is gone") == 1
    assert stub.asked("/model/m/twinkle/step") == []
    assert stub.asked("/twinkle/finish_session") == []


def test_a_request_may_be_the_first_to_learn_that_the_session_ended(stub, client):
    detail = f"session_id: got '{SESSION}', allowed: a session that is active, this one is expired: make a new client"
    stub.fail("/model/m/twinkle/step", Status(400, {"detail": detail}))
    for _ in range(2):
        with pytest.raises(SessionLostError, match="expired"):
            client.post("/model/m/twinkle/step", b"{}")
    assert len(stub.asked("/model/m/twinkle/step")) == 1


def test_a_lost_session_is_known_by_its_code(stub, client):
    lost = {"detail": "words that people read", "code": "session_lost"}
    stub.fail("/model/m/twinkle/step", Status(410, lost))
    with pytest.raises(SessionLostError, match="words that people read"):
        client.post("/model/m/twinkle/step", b"{}")


def test_another_code_is_not_about_the_session_whatever_its_text_names(stub, client):
    stub.fail("/model/m/twinkle/step", Status(404, {"detail": f"unknown thing of {SESSION}", "code": "other"}))
    with pytest.raises(NotFoundError) as caught:
        client.post("/model/m/twinkle/step", b"{}")
    assert caught.value.code == "other"


def test_an_error_about_a_run_of_the_session_is_not_about_the_session(stub, client):
    stub.fail("/model/m/twinkle/step", Status(404, {"detail": f"unknown adapter {SESSION}-default"}))
    with pytest.raises(NotFoundError):
        client.post("/model/m/twinkle/step", b"{}")
    stub.answer("/model/m/twinkle/step", {})
    client.post("/model/m/twinkle/step", b"{}")


def test_a_heartbeat_that_fails_for_a_while_is_no_loss(stub, caplog):
    stub.fail("/twinkle/session_heartbeat", Drop(), Status(503), Drop())
    with caplog.at_level(logging.INFO, "twinkle_client"), TwinkleClient(stub.url, "t", 0.02) as client:
        wait_until(lambda: "is back" in caplog.text)
        stub.answer("/model/m/twinkle/step", {})
        client.post("/model/m/twinkle/step", b"{}")
    assert caplog.text.count("a heartbeat of session") == 1


def test_a_client_without_a_server_is_an_error(stub):
    stub.close()
    with pytest.raises(ConnectionLostError, match="cannot connect"):
        TwinkleClient(stub.url, retry_deadline=0)


@pytest.mark.parametrize("variable", [False, True])
def test_a_server_that_never_answered_is_given_up_soon(stub, monkeypatch, caplog, variable):
    stub.close()
    if variable:
        monkeypatch.setenv("TWINKLE_CONNECT_DEADLINE", "0.5")
    with pytest.raises(ConnectionLostError, match=f"no server answers at {stub.url}/api/v1: tried") as caught:
        TwinkleClient(stub.url, connect_deadline=None if variable else 0.5)  # retry_deadline: five minutes
    for hint in ("twinkle-server status", "TWINKLE_SERVER_URL", "TWINKLE_CONNECT_DEADLINE"):
        assert hint in str(caught.value)
    assert "trying again for up to 0.5 s" in caplog.text


def test_a_missing_server_is_an_error_within_30_seconds_by_default(monkeypatch):
    seen = []
    monkeypatch.setattr(TwinkleClient, "create_session", lambda client, _: seen.append(client._transport) or SESSION)
    with TwinkleClient("http://127.0.0.1:1", session_heartbeat_interval=1000):
        (used,) = seen
    # no attempt begins after the deadline, and an attempt to connect has a time limit of its own
    assert used.retries.connect_deadline + used._http.timeout.connect <= 30
    assert used.retries.deadline == 300, "once a server has answered"


def test_a_server_that_accepts_connections_and_never_answers_is_given_up(monkeypatch):
    monkeypatch.setattr(transport, "_CONNECT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ConnectionLostError, match=f"no server answers at {url}/api/v1: tried"):
            TwinkleClient(url, connect_deadline=0.5, retry_deadline=10)


def test_a_server_that_comes_up_just_before_the_deadline_is_found(stub, monkeypatch):
    """The last wait is shortened, so that the last attempt begins at the deadline."""
    monkeypatch.setattr("random.uniform", lambda _least, most: most)
    stub.fail("/twinkle/create_session", Drop(), Drop())  # then waits of 0.25 and 0.5 s
    TwinkleClient(stub.url, connect_deadline=0.6, session_heartbeat_interval=1000).close()


def test_a_connect_deadline_of_zero_means_one_attempt(stub):
    stub.close()
    with pytest.raises(ConnectionLostError, match="no server answers"):
        TwinkleClient(stub.url, connect_deadline=0)


def test_a_wrong_connect_deadline_is_named(monkeypatch):
    with pytest.raises(InvalidRequestError, match="connect_deadline: got -1, allowed: seconds, 0 or more"):
        TwinkleClient("http://127.0.0.1:1", connect_deadline=-1)
    monkeypatch.setenv("TWINKLE_CONNECT_DEADLINE", "soon")
    with pytest.raises(InvalidRequestError, match="TWINKLE_CONNECT_DEADLINE: got 'soon'"):
        TwinkleClient("http://127.0.0.1:1")


def test_a_server_that_answered_before_is_waited_for(stub, connect, monkeypatch, caplog):
    """With a line from time to time that says what the client waits for."""
    monkeypatch.setattr(transport, "_LINE_SECONDS", 0.0)
    client = connect(connect_deadline=0.001)
    stub.answer(CAPABILITIES, MODELS)
    stub.fail(CAPABILITIES, Drop(), Drop(), Drop())
    assert client.get_server_capabilities().supported_models[0].model_name == "m"
    first, *later = [record.getMessage() for record in caplog.records if CAPABILITIES in record.getMessage()]
    assert first.endswith("trying again for up to 5 s")
    assert len(later) == 2
    assert all(line.startswith("still waiting, ") and stub.url in line for line in later)


# --- retries ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [Drop(), Cut(), *(Status(code) for code in (408, 429, 502, 503, 504, 507))], ids=repr)
def test_what_may_become_better_is_tried_again(stub, client, fault):
    stub.answer("/processor/twinkle/call", {"result": 1})
    stub.fail("/processor/twinkle/call", fault, fault)
    assert client.post("/processor/twinkle/call", encode({"a": 1}), once=True) == {"result": 1}
    asked = stub.asked("/processor/twinkle/call")
    assert len(asked) == 3
    assert len({request.headers["x-idempotency-key"] for request in asked}) == 1
    assert [request.body for request in asked] == [{"a": 1}] * 3


def test_every_request_has_a_key_of_its_own(stub, client):
    stub.answer("/processor/twinkle/call", {"result": 1})
    for _ in range(2):
        client.post("/processor/twinkle/call", b"{}", once=True)
    keys = {asked.headers["x-idempotency-key"] for asked in stub.asked("/processor/twinkle/call")}
    assert len(keys) == 2


def test_an_answer_that_does_not_come_is_asked_for_again(stub, connect):
    client = connect(timeout=0.2)
    stub.answer(CAPABILITIES, MODELS)
    stub.fail(CAPABILITIES, Slow(1.0))
    assert client.get_server_capabilities().supported_models[0].model_name == "m"
    assert len(stub.asked(CAPABILITIES)) == 2


def test_retry_after_is_heeded(stub, client):
    stub.answer(CAPABILITIES, MODELS)
    stub.fail(CAPABILITIES, Status(429, headers={"Retry-After": "1"}))
    began = time.monotonic()
    client.get_server_capabilities()
    assert time.monotonic() - began >= 1.0


def test_the_deadline_ends_it_with_the_servers_words(stub, connect):
    client = connect(retry_deadline=0.5)
    stub.fail(CAPABILITIES, *[Status(429, {"detail": "adapters: 4 of 4 in use"})] * 50)
    with pytest.raises(LimitError, match="4 of 4 in use") as caught:
        client.get_server_capabilities()
    assert caught.value.status == 429
    assert caught.value.detail == "adapters: 4 of 4 in use"
    assert caught.value.url.endswith(CAPABILITIES)
    assert 2 <= len(stub.asked(CAPABILITIES)) < 20
    stub.faults[CAPABILITIES].clear()
    stub.fail(CAPABILITIES, *[Drop()] * 50)
    with pytest.raises(ConnectionLostError, match=r"lost the connection .* tries"):
        client.get_server_capabilities()


def test_a_server_asking_for_more_than_the_deadline_is_not_waited_for(stub, client):
    stub.fail(CAPABILITIES, Status(503, headers={"Retry-After": "3600"}))
    with pytest.raises(ServerError, match="try again"):
        client.get_server_capabilities()


def test_waits_double_up_to_a_limit_and_vary():
    backoff = Backoff(RetryPolicy(deadline=1e9, first_wait=1.0, longest_wait=4.0))
    waits = [backoff.next_wait() for _ in range(6)]
    for wait, longest in zip(waits, (1, 2, 4, 4, 4, 4), strict=True):
        assert longest / 2 <= wait <= longest
    assert len(set(waits)) == 6
    assert Backoff(RetryPolicy(deadline=0)).next_wait() is None
    assert Backoff(RetryPolicy(deadline=10)).next_wait(server_asked=7.0) == 7.0


def test_retry_after_may_be_a_date():
    date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 30))
    assert 25 < retry_after_seconds({"retry-after": date}) <= 30
    assert retry_after_seconds({"retry-after": "2.5"}) == 2.5
    for nonsense in ("soon", "inf", "nan", ""):
        assert retry_after_seconds({"retry-after": nonsense}) is None
    assert retry_after_seconds({}) is None


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (400, InvalidRequestError),
        (401, AuthenticationError),
        (403, AuthenticationError),
        (404, NotFoundError),
        (409, InvalidRequestError),
        (410, GoneError),
        (413, InvalidRequestError),
        (422, InvalidRequestError),
        (500, ServerError),
    ],
)
def test_each_status_is_an_error_of_its_own_and_not_tried_again(stub, client, code, kind):
    stub.fail(CAPABILITIES, Status(code, {"detail": "the server's words"}))
    with pytest.raises(kind, match="the server's words") as caught:
        client.get_server_capabilities()
    assert isinstance(caught.value, TwinkleClientError)
    assert caught.value.status == code
    assert caught.value.detail == "the server's words"
    assert len(stub.asked(CAPABILITIES)) == 1


def test_answers_that_nobody_can_read(stub, client):
    stub.fail(CAPABILITIES, Status(200, b"<html>a proxy</html>"), Status(200, {"supported_models": 3}))
    with pytest.raises(ServerError, match=r"not JSON.*a proxy"):
        client.get_server_capabilities()
    with pytest.raises(ServerError, match="not a GetServerCapabilitiesResponse: supported_models"):
        client.get_server_capabilities()
    stub.fail(CAPABILITIES, Status(500, b"<h1>it burns</h1>"), Status(400, {"detail": [{"loc": "x"}]}))
    with pytest.raises(ServerError, match="it burns"):
        client.get_server_capabilities()
    with pytest.raises(InvalidRequestError, match='"loc": "x"'):
        client.get_server_capabilities()


def test_an_address_that_is_none():
    with pytest.raises(InvalidRequestError, match="base_url"):
        TwinkleClient("ftp://somewhere")


# --- connections ------------------------------------------------------------------------------------------------------


def test_connections_are_kept(stub, client):
    stub.answer(CAPABILITIES, MODELS)
    for _ in range(5):
        client.get_server_capabilities()
    assert len({asked.connection for asked in stub.asked(CAPABILITIES)}) == 1


def test_threads_share_a_client(stub, client):
    stub.answer(CAPABILITIES, MODELS)
    together = threading.Barrier(8)

    def ask(_):
        together.wait()
        return client.get_server_capabilities().supported_models[0].model_name

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == ["m"] * 8


def test_a_transport_of_the_tests():
    seen = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request.url.path)
        return httpx.Response(200, json={"session_id": "session_x"})

    with TwinkleClient("http://nowhere", http_transport=httpx.MockTransport(handle)) as client:
        assert client.session_id == "session_x"
    assert seen[0] == "/api/v1/twinkle/create_session"


# --- what the gateway offers ------------------------------------------------------------------------------------------


def test_runs_and_checkpoints(stub, client):
    run = {"training_run_id": "r", "base_model": "b", "model_owner": "t", "is_lora": True}
    page = {"training_runs": [run], "cursor": {"limit": 20, "offset": 0, "total_count": 1}}
    stub.answer("/twinkle/training_runs", page)
    assert client.list_training_runs(all_users=True)[0].training_run_id == "r"
    assert client.list_training_runs_with_cursor(limit=5)[1].total_count == 1
    assert client.find_training_run_by_model("b")[0].base_model == "b"
    assert client.find_training_run_by_model("c") == []
    queries = [asked.query for asked in stub.asked("/twinkle/training_runs")]
    assert queries[:2] == ["limit=20&offset=0&all_users=true", "limit=5&offset=0"]

    stub.answer("/twinkle/training_runs/r", run)
    assert client.get_training_run("r").model_owner == "t"
    checkpoint = {
        "checkpoint_id": "weights/x",
        "checkpoint_type": "training",
        "time": "2026-01-01T00:00:00",
        "size_bytes": 0,
        "twinkle_path": "twinkle://r/weights/x",
    }
    stub.answer("/twinkle/training_runs/r/checkpoints", {"checkpoints": [checkpoint], "cursor": None})
    path = {"path": "twinkle://r/weights/x", "twinkle_path": "twinkle://r/weights/x"}
    stub.answer("/twinkle/checkpoint_path/r/weights/x", path)
    parsed = client.get_checkpoint_path("r", "weights/x")
    assert (parsed.training_run_id, parsed.checkpoint_type) == ("r", "weights")
    assert client.get_checkpoint_twinkle_path("r", "weights/x") == "twinkle://r/weights/x"
    assert client.get_latest_checkpoint_path("r") == "twinkle://r/weights/x"
    stub.answer("/twinkle/training_runs/r/checkpoints/weights/x", {"success": True, "message": "gone"})
    assert client.delete_checkpoint("r", "weights/x").success
    assert stub.requests[-1].method == "DELETE"

    stub.answer("/twinkle/weights_info", {"training_run_id": "r", "base_model": "b", "model_owner": "t"})
    assert client.get_weights_info("twinkle://r/weights/x").base_model == "b"
    assert stub.bodies("/twinkle/weights_info") == [{"twinkle_path": "twinkle://r/weights/x"}]
    stub.answer("/twinkle/capacity_info", {"max_loras": 5, "used_loras": 1, "free_loras": 4})
    assert client.get_capacity_info().free_loras == 4


def test_health(stub, client):
    assert client.health_check()
    stub.fail("/twinkle/healthz", Status(503))
    assert not client.health_check()


# --- what a body may contain ------------------------------------------------------------------------------------------


class Picture:
    """An object that JSON cannot hold, like a PIL image."""


def test_arrays_and_scalars_become_numbers():
    body = encode({"a": np.arange(3), "b": {"c": np.float32(0.5)}, "d": (1, 2), "e": {"z", "y"}, "f": np.int64(3)})
    assert body == b'{"a":[0,1,2],"b":{"c":0.5},"d":[1,2],"e":["y","z"],"f":3}'


def test_tensors_too():
    torch = pytest.importorskip("torch")
    body = encode({"a": torch.tensor([[1, 2]]), "b": torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True)})
    assert body == b'{"a":[[1,2]],"b":0.5}'


@pytest.mark.parametrize("value", [float("nan"), float("inf"), np.float64("nan"), np.array([1.0, -np.inf])])
def test_what_is_not_finite_is_named_and_never_sent(value):
    with pytest.raises(InvalidRequestError, match=r"inputs\[1\]\.advantages"):
        encode({"inputs": [{"advantages": 1.0}, {"advantages": value}]})
    with pytest.raises(InvalidRequestError, match=r"inputs\[0\]\.old_logps"):  # also next to input_ids
        encode({"inputs": [{"input_ids": [1], "old_logps": value}]})


def test_what_json_cannot_say_is_left_out_beside_tokens_and_an_error_elsewhere():
    picture = {"role": "user", "content": [{"type": "image", "image": Picture()}]}
    row = {"input_ids": np.array([1, 2]), "messages": [picture], "pixel_values": np.zeros((1, 2)), "length": 2}
    wanted = b'{"inputs":[{"input_ids":[1,2],"pixel_values":[[0.0,0.0]],"length":2}]}'
    assert encode({"inputs": [row]}) == wanted
    assert b"input_ids" in encode({"inputs": [{"positive": row, "negative": row}]})
    with pytest.raises(InvalidRequestError, match=r"inputs\[0\]\.messages\[0\]\.content\[0\]\.image: got"):
        encode({"inputs": [{"messages": [picture]}]})


def test_code_is_never_shipped():
    with pytest.raises(InvalidRequestError, match=r"patch: .*code is never shipped"):
        encode({"patch": lambda row: row})
