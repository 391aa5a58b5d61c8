"""At a tenant's limits its silent sessions make room for new ones.

Time during which the server was frozen does not count.
"""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.servers.otlp_collector import eventually
from tests.support.servers.running import MODEL, Server, Tenant, key_for, mock_config, sample_body
from twinkle.server.gateway.running_time import RunningTime

SILENT = 1.5  # seconds
LIMITS = {"silent_session_seconds": SILENT, "max_adapters_per_tenant": 3, "max_sessions_per_tenant": 6}


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("small"), mock_config(limits=LIMITS), housekeeping=0.2).start()
    time.sleep(SILENT)  # the server judges silence only after it has listened for this long
    yield server
    log = server.log()
    assert server.stop() == 0
    assert "Traceback" not in log, log


@pytest.fixture
def guest(small_server: Server, request: pytest.FixtureRequest) -> Tenant:
    return Tenant(small_server.url, key_for(request.node.name))


def create_body(session: str) -> dict[str, object]:
    return {"session_id": session, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 8}}


def beat(tenant: Tenant, *sessions: str) -> list[int]:
    return [tenant.post("session_heartbeat", {"session_id": each}).status_code for each in sessions]


def fall_silent(tenant: Tenant, *alive: str) -> None:
    """Wait until all sessions except ``alive`` are silent."""
    until = time.monotonic() + SILENT + 0.3
    while time.monotonic() < until:
        beat(tenant, *alive)
        time.sleep(0.2)


def states(tenant: Tenant) -> dict[str, str]:
    listed = tenant.get("twinkle/sessions").json()["sessions"]
    return {each["session_id"]: each["state"] for each in listed}


def where(tenant: Tenant) -> dict[str, str]:
    listed = tenant.get("twinkle/adapters").json()["adapters"]
    return {each["training_run_id"]: each["where"] for each in listed}


def test_the_31st_script(guest: Tenant) -> None:
    """Scripts come and go without ending their sessions.

    Each new one is admitted, and the longest silent one is evicted.
    """
    models = [guest.model() for _ in range(3)]
    alive = models[1].partition(":")[0]
    guest.result(guest.forward_backward(models[0], 1))
    guest.result(guest.optim_step(models[0], 2))
    fall_silent(guest, alive)
    fourth = guest.model()
    assert [where(guest)[model] == "parked" for model in models] == [True, False, False], "only as many as needed"
    fifth = guest.model()
    assert [where(guest)[model] == "parked" for model in models] == [True, False, True], "the live one stays"
    # A client that returns to an evicted adapter is told how to continue.
    message = guest.error(guest.forward_backward(models[0], 3))
    assert "fell silent" in message
    path = f"tinker://{models[0]}/weights/parked"
    assert f"create_training_client_from_state_with_optimizer('{path}')" in message
    fall_silent(guest, alive)
    again = guest.model()  # takes the place of the fourth
    assert guest.json(guest.load(again, 1, path))
    assert guest.loss(guest.forward_backward(fifth, 1)) > 0
    assert guest.loss(guest.forward_backward(models[1], 1)) > 0
    assert fourth not in {model for model, place in where(guest).items() if place != "parked"}


def test_nobody_is_silent(guest: Tenant) -> None:
    sessions = [guest.session() for _ in range(2)]
    guest.model(sessions[0])
    guest.model(sessions[0], 1)
    guest.model(sessions[1])
    answer = guest.post("create_model", create_body(guest.session()))
    assert answer.status_code == 429
    said = answer.json()["detail"]
    assert "adapters: 3 of 3 in use (max_adapters_per_tenant)" in said
    assert f"{sessions[0]} (2), {sessions[1]} (1)" in said
    assert "POST /api/v1/sessions/SESSION_ID/finish" in said
    finished = {"reason": {"type": "success"}, "detail": None}
    assert guest.post(f"sessions/{sessions[1]}/finish", finished).status_code == 200
    assert guest.model()


def test_requests_are_signs_of_life_too(guest: Tenant) -> None:
    """A client written by a user may send no heartbeats at all."""
    models = [guest.model() for _ in range(3)]
    heard, longest_gap, seq = time.monotonic(), 0.0, 0
    until = heard + SILENT + 0.9
    while time.monotonic() < until:
        seq += 1
        for model in models:
            guest.result(guest.forward_backward(model, seq))
        longest_gap, heard = max(longest_gap, time.monotonic() - heard), time.monotonic()
        time.sleep(0.2)
    answer = guest.post("create_model", create_body(guest.session()))
    if max(longest_gap, time.monotonic() - heard) >= SILENT:
        pytest.skip("this machine stalled for longer than the server waits for a sign of life")
    assert answer.status_code == 429


def test_sessions_make_room(guest: Tenant) -> None:
    sessions = [guest.session() for _ in range(6)]
    refused = guest.post("create_session", {})
    assert refused.status_code == 429
    assert "active sessions: 6 of 6 in use" in refused.json()["detail"]
    assert sessions[-1] in refused.json()["detail"]
    fall_silent(guest, *sessions[3:])
    guest.session()
    assert beat(guest, *sessions) == [410, 200, 200, 200, 200, 200], "the longest silent one ended, and no other"


def test_silent_sessions_do_not_look_active(guest: Tenant) -> None:
    gone, alive = guest.session(), guest.session()
    # On a machine that stalls, a live session may look silent for a moment: each answer is asked for until it is right.
    eventually(lambda: beat(guest, alive) and states(guest) == {gone: "silent", alive: "active"})

    def active() -> list[str]:
        found = guest.post("sessions/search", {"statuses": [{"type": "active"}]}).json()["sessions"]
        return [each["session_id"] for each in found]

    def statuses() -> dict[str, object]:
        found = guest.post("sessions/search", {}).json()["sessions"]
        return {each["session_id"]: each["status"] for each in found}

    eventually(lambda: beat(guest, alive) and active() == [alive])
    eventually(lambda: beat(guest, alive) and statuses() == {gone: None, alive: {"type": "active"}})
    eventually(lambda: beat(guest, gone, alive) and states(guest) == {gone: "active", alive: "active"})


def test_a_frozen_server_ends_no_session(own_server: Callable[..., Server]) -> None:
    limits = {"session_timeout_seconds": 3.0, "silent_session_seconds": 3.0, "max_adapters_per_tenant": 1}
    server = own_server(mock_config(limits=limits), housekeeping=0.1)
    tenant = Tenant(server.url, "tml-frozen")
    session = tenant.session()
    model = tenant.model(session)
    assert server.process is not None
    server.process.send_signal(signal.SIGSTOP)
    time.sleep(5)
    server.process.send_signal(signal.SIGCONT)
    time.sleep(0.5)  # a few rounds of maintenance, before the client's next heartbeat
    assert beat(tenant, session) == [200]
    assert tenant.post("create_model", create_body(tenant.session())).status_code == 429, "nor is it silent"
    assert tenant.loss(tenant.forward_backward(model, 1)) > 0
    assert "sessions count as heard of now" in server.log()


# --- the clocks -------------------------------------------------------------------------------------------------------


class Clocks:
    def __init__(self) -> None:
        self.wall, self.monotonic = 1000.0, 50.0
        self.time = RunningTime(60.0, clock=lambda: self.wall, monotonic=lambda: self.monotonic)
        self.time.tick()

    def go_on(self, seconds: float) -> None:
        """Let time pass as in a running process, with all ticks."""
        for _ in range(round(seconds / 5)):
            self.wall += 5
            self.monotonic += 5
            self.time.tick()


def test_time_goes_on_evenly() -> None:
    clocks = Clocks()
    assert not clocks.time.ran_for(60)
    clocks.go_on(60)
    assert clocks.time.ran_for(60)
    assert not clocks.time.take_interruption()


@pytest.mark.parametrize(
    ("wall", "monotonic"),
    [(45.0, 45.0), (45.0, 1.0), (3600.0, 5.0), (-3600.0, 5.0)],
    ids=["stopped", "suspended", "set forward", "set back"],
)
def test_a_break_is_noticed(wall: float, monotonic: float) -> None:
    clocks = Clocks()
    clocks.go_on(120)
    clocks.wall += wall
    clocks.monotonic += monotonic
    assert clocks.time.take_interruption(), "even before the next tick"
    assert not clocks.time.take_interruption(), "once"
    assert not clocks.time.ran_for(10)
    clocks.go_on(60)
    assert clocks.time.ran_for(60)
    assert not clocks.time.take_interruption()


# --- samples ----------------------------------------------------------------------------------------------------------


def waiting_samples(tenant: Tenant) -> int:
    models = tenant.get("status").json()["models"]
    return int(next(iter(models.values()))["waiting_samples"])


def sampler(tenant: Tenant, session: str) -> str:
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
    return str(tenant.post("create_sampling_session", body).json()["sampling_session_id"])


def test_samples_of_a_client_that_vanished_are_cancelled(own_server: Callable[..., Server]) -> None:
    """One client is killed, one only sends heartbeats, one only polls: only the samples of the first are cancelled."""
    server = own_server(mock_config(limits={"silent_session_seconds": SILENT}), housekeeping=0.2, sample=0.2)
    long = {"max_tokens": 4000, "seed": 1, "stop": []}
    tenants = {name: Tenant(server.url, f"tml-{name}") for name in ("killed", "beating", "asking")}
    requests, sessions = {}, {}
    for name, tenant in tenants.items():
        sessions[name] = tenant.session()
        body = sample_body(sampler(tenant, sessions[name]), sampling_params=long)
        requests[name] = [tenant.submit("asample", {**body, "seq_id": seq}) for seq in range(3)]
    assert waiting_samples(tenants["asking"]) == 9
    # The server must also have listened for a while.
    until = time.monotonic() + 2 * SILENT + 1
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(tenants["asking"].result, requests["asking"][0])
        while time.monotonic() < until:
            beat(tenants["beating"], sessions["beating"])
            time.sleep(0.2)
        assert waiting_samples(tenants["beating"]) == 6
        answer = tenants["killed"].poll(requests["killed"][0])
        assert answer.status_code == 410
        assert "send it again" in answer.json()["detail"]
        server.kill()
        with contextlib.suppress(Exception):
            asked.result(60)
