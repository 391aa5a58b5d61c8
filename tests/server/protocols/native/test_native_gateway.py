"""The native protocol's gateway: sessions, health, served models, runs and checkpoints, and ownership."""

import threading
import time
from collections.abc import Callable

import httpx
import pytest

from tests.support.servers.native_caller import Caller
from tests.support.servers.running import MODEL, Server, Tenant
from twinkle.server.http.requests import PREFIX
from twinkle.server.protocols.native import gateway_routes as native_gateway
from twinkle.server.protocols.native import sampler_routes as native_sampler
from twinkle_client import types
from twinkle_client.protocol.base import SESSION_LOST

# Monitoring has no key.
PUBLIC = {
    "/-/healthz",
    "/-/routes",
    "/api/v1/twinkle/healthz",
    "/api/v1/twinkle/healthz/deep",
    "/api/v1/twinkle/status",
    "/api/v1/model/{model}/healthz",
    "/api/v1/sampler/{model}/healthz",
}


@pytest.fixture
def caller(server: Server, tenant: Tenant) -> Caller:
    """The same tenant in the native protocol."""
    return Caller(server.url, tenant.key)


@pytest.fixture
def stranger(server: Server, other_tenant: Tenant) -> Caller:
    return Caller(server.url, other_tenant.key)


# --- sessions ---------------------------------------------------------------------------------------------------------


def test_sessions_live_and_end(caller: Caller, stranger: Caller) -> None:
    session = caller.session(purpose="test")
    assert types.CreateSessionResponse(session_id=session).session_id.startswith("session_")
    assert len(session) == len("session_") + 32
    body = {"session_id": session}
    assert caller.post("session_heartbeat", body).json() == {}
    unknown = {"session_id": "session_" + "0" * 32}
    for path in ("session_heartbeat", "finish_session"):
        foreign, missing = stranger.post(path, body), stranger.post(path, unknown)
        assert foreign.status_code == missing.status_code == 404
        assert foreign.text == missing.text.replace(unknown["session_id"], session)
    assert caller.post("finish_session", body).json() == {}
    assert caller.post("finish_session", body).status_code == 200
    gone = caller.post("session_heartbeat", body)
    assert gone.status_code == 410
    assert "finished" in gone.json()["detail"]
    assert gone.json()["code"] == missing.json()["code"] == SESSION_LOST


def test_session_metadata_is_kept(caller: Caller, tenant: Tenant) -> None:
    session = caller.session(purpose="test", numbers=[1, 2])
    # Tinker's protocol shows values that are not text as JSON.
    assert tenant.get(f"sessions/{session}").json()["user_metadata"] == {"purpose": "test", "numbers": "[1, 2]"}


def test_a_key_makes_one_session(caller: Caller, stranger: Caller, tenant: Tenant) -> None:
    def create(who: Caller, key: str) -> str:
        return str(who.post("create_session", {}, **{"X-Idempotency-Key": key}).json()["session_id"])

    assert create(caller, "k") == create(caller, "k")
    assert create(caller, "k") != create(caller, "l")
    assert create(caller, "k") != create(stranger, "k")
    other_protocol = tenant.post("create_session", {}, **{"X-Idempotency-Key": "k"}).json()["session_id"]
    assert other_protocol.startswith("s-")
    assert caller.post("create_session", {}, **{"X-Idempotency-Key": "k" * 257}).status_code == 400


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("create_session", {"metadata": 5}, "metadata: got 5"),
        ("create_session", {"metadata": {"x": "y" * 70_000}}, "16384 bytes"),
        ("create_session", {"metadata": {"twinkle.sampler_templates": {}}}, "twinkle.sampler_templates"),
        ("session_heartbeat", {}, "session_id: Field required"),
        ("session_heartbeat", {"session_id": 5}, "session_id: got 5"),
        ("finish_session", [], "body: got []"),
        ("weights_info", {"twinkle_path": "/etc/passwd"}, "twinkle_path: got '/etc/passwd'"),
        ("weights_info", {}, "twinkle_path: Field required"),
    ],
)
def test_malformed(caller: Caller, path: str, body: object, said: str) -> None:
    answer = caller.post(path, body)
    assert answer.status_code == 400
    assert said in answer.json()["detail"]


# --- the server -------------------------------------------------------------------------------------------------------


def test_what_is_served(caller: Caller, server: Server) -> None:
    models = types.GetServerCapabilitiesResponse.model_validate(caller.get("get_server_capabilities").json())
    assert [model.model_name for model in models.supported_models] == [MODEL]
    alive = httpx.get(f"{server.url}/-/healthz", trust_env=False)
    assert (alive.status_code, alive.text) == (200, "success"), "as of Ray Serve's proxy"
    prefixes = httpx.get(f"{server.url}/-/routes", trust_env=False).json()
    assert prefixes[f"{PREFIX}/processor"] == "processor"
    assert prefixes[f"{PREFIX}/sampler/{MODEL}"] == "sampler"


def test_capacity_is_the_tenants_own(caller: Caller, stranger: Caller, tenant: Tenant) -> None:
    assert caller.get("capacity_info").json() == {"max_loras": 30, "used_loras": 0, "free_loras": 30}
    tenant.model()
    assert caller.get("capacity_info").json() == {"max_loras": 30, "used_loras": 1, "free_loras": 29}
    assert stranger.get("capacity_info").json()["used_loras"] == 0


def test_status_counts(caller: Caller, tenant: Tenant) -> None:
    tenant.model()
    status = caller.get("status").json()
    assert status["resources"]["sessions"] >= 1
    assert status["resources"]["models"] >= 1
    assert set(status["resources"]) == {"sessions", "models", "sampling_sessions", "futures"}
    assert status["cleanup"] == {"running": True, "expiration_timeout": 1800.0}
    assert status["models"][MODEL]["adapters"] >= 1


def test_health(server: Server) -> None:
    def get(path: str) -> httpx.Response:
        return httpx.get(f"{server.url}{path}", trust_env=False)

    assert get("/api/v1/twinkle/healthz").json() == {"status": "ok"}
    deep = get("/api/v1/twinkle/healthz/deep")
    assert deep.status_code == 200
    assert deep.json()["healthy"] is True
    assert deep.json()["models"][MODEL]["healthy"] is True
    assert get(f"/api/v1/model/{MODEL}/healthz").json()["healthy"] is True
    assert get(f"/api/v1/sampler/{MODEL}/healthz").json()["healthy"] is True
    assert get("/api/v1/model/org/none/healthz").status_code == 404
    assert get("/api/v1/sampler/org/none/healthz").status_code == 404


def test_health_does_not_wait_for_training(own_server: Callable[..., Server]) -> None:
    """A pass takes seconds here, and the answer comes while it runs."""
    server = own_server(None, **{"pass": 3.0})
    tenant = Tenant(server.url, "tml-busy")
    future = tenant.forward_backward(tenant.model(), 1)
    done = threading.Event()
    waiting = threading.Thread(target=lambda: (tenant.result(future), done.set()))
    waiting.start()
    time.sleep(0.3)
    assert httpx.get(f"{server.url}/api/v1/twinkle/healthz/deep", trust_env=False, timeout=30).status_code == 200
    assert not done.is_set()
    waiting.join()


# --- runs and checkpoints ---------------------------------------------------------------------------------------------


@pytest.fixture
def run(tenant: Tenant) -> str:
    """Create a run of Tinker's protocol with three checkpoints."""
    run = tenant.model(rank=4)
    for seq_id, name in enumerate(("first", "second"), start=1):
        tenant.json(tenant.save(run, seq_id, name))
    tenant.json(tenant.submit("save_weights_for_sampler", {"model_id": run, "seq_id": 3, "path": "third"}))
    return run


def test_runs(caller: Caller, run: str) -> None:
    listed = types.TrainingRunsResponse.model_validate(caller.get("training_runs").json())
    assert listed.cursor == types.Cursor(limit=20, offset=0, total_count=1)
    (one,) = listed.training_runs
    assert one == types.TrainingRun.model_validate(caller.get(f"training_runs/{run}").json())
    assert (one.training_run_id, one.base_model, one.lora_rank) == (run, MODEL, 4)
    assert one.is_lora
    assert not one.corrupted
    assert one.last_checkpoint is not None
    assert one.last_checkpoint["twinkle_path"] == f"twinkle://{run}/weights/second"
    assert one.last_sampler_checkpoint is not None
    assert types.Checkpoint.model_validate(one.last_sampler_checkpoint).checkpoint_type == "sampler"


def test_pages(caller: Caller, tenant: Tenant) -> None:
    session = tenant.session()
    runs = [tenant.model(session, number) for number in range(3)]
    pages = [caller.get("training_runs", limit=2, offset=offset).json() for offset in (0, 2)]
    assert [len(page["training_runs"]) for page in pages] == [2, 1]
    assert {run["training_run_id"] for page in pages for run in page["training_runs"]} == set(runs)
    assert pages[1]["cursor"] == {"limit": 2, "offset": 2, "total_count": 3}
    for query in ({"limit": 0}, {"limit": "x"}, {"offset": -1}, {"all_users": "perhaps"}):
        assert caller.get("training_runs", **query).status_code == 400


def test_all_users_are_the_caller(stranger: Caller, run: str) -> None:
    listed = stranger.get("training_runs", all_users=True).json()
    assert listed["training_runs"] == []
    assert listed["cursor"]["total_count"] == 0


def test_checkpoints_oldest_first(caller: Caller, run: str) -> None:
    answer = caller.get(f"training_runs/{run}/checkpoints").json()
    assert answer["cursor"] is None
    checkpoints = types.CheckpointsListResponse.model_validate(answer).checkpoints
    assert [each.checkpoint_id for each in checkpoints] == [
        "weights/first",
        "weights/second",
        "sampler_weights/third",
    ]
    first = checkpoints[0]
    assert first.twinkle_path == f"twinkle://{run}/weights/first"
    assert (first.checkpoint_type, first.base_model, first.lora_rank) == ("training", MODEL, 4)
    assert (first.train_unembed, first.train_mlp, first.train_attn) == (True, True, True)
    assert first.size_bytes > 0


def test_addresses_and_weights_info(caller: Caller, run: str) -> None:
    address = f"twinkle://{run}/weights/first"
    path = caller.get(f"checkpoint_path/{run}/weights/first").json()
    assert path == {"path": address, "twinkle_path": address}
    info = caller.post("weights_info", {"twinkle_path": address}).json()
    assert (info["training_run_id"], info["base_model"], info["lora_rank"]) == (run, MODEL, 4)
    assert caller.post("weights_info", {"twinkle_path": f"tinker://{run}/weights/first"}).json() == info


def test_delete(caller: Caller, tenant: Tenant, run: str) -> None:
    address = f"training_runs/{run}/checkpoints/weights/first"
    deleted = types.DeleteCheckpointResponse.model_validate(caller.http.delete(f"twinkle/{address}").json())
    assert deleted.success
    assert caller.http.delete(f"twinkle/{address}").status_code == 404
    left = caller.get(f"training_runs/{run}/checkpoints").json()["checkpoints"]
    assert [each["checkpoint_id"] for each in left] == ["weights/second", "sampler_weights/third"]
    assert len(tenant.get(f"training_runs/{run}/checkpoints").json()["checkpoints"]) == 2


@pytest.mark.parametrize("checkpoint", ["weights/..", "weights/a/b", "weights", "other/first", "%2e%2e/first"])
def test_odd_checkpoint_ids(caller: Caller, run: str, checkpoint: str) -> None:
    for answer in (
        caller.http.delete(f"twinkle/training_runs/{run}/checkpoints/{checkpoint}"),
        caller.http.get(f"twinkle/checkpoint_path/{run}/{checkpoint}"),
    ):
        assert answer.status_code in (400, 404, 405)  # the client's URL library may resolve the dots
    assert len(caller.get(f"training_runs/{run}/checkpoints").json()["checkpoints"]) == 3


def test_foreign_is_unknown(caller: Caller, stranger: Caller, run: str) -> None:
    nobody = "s-" + "0123456789abcdef" * 2 + ":train:0"
    asked: list[Callable[[str], httpx.Response]] = [
        lambda run: stranger.get(f"training_runs/{run}"),
        lambda run: stranger.get(f"training_runs/{run}/checkpoints"),
        lambda run: stranger.get(f"checkpoint_path/{run}/weights/first"),
        lambda run: stranger.http.delete(f"twinkle/training_runs/{run}/checkpoints/weights/first"),
        lambda run: stranger.post("weights_info", {"twinkle_path": f"twinkle://{run}/weights/first"}),
    ]
    for ask in asked:
        foreign, unknown = ask(run), ask(nobody)
        assert foreign.status_code == unknown.status_code == 404
        assert foreign.text == unknown.text.replace(nobody, run)
    assert len(caller.get(f"training_runs/{run}/checkpoints").json()["checkpoints"]) == 3


# --- keys -------------------------------------------------------------------------------------------------------------


def test_every_route_wants_a_token(server: Server) -> None:
    """Any token is accepted in open mode; without one all answers are the same."""
    routes = [route.endpoint for area in (native_gateway, native_sampler) for route in area.routes.declared]
    answers = set()
    for route in routes:
        path = route.path_format.format(model=MODEL, run_id="r", checkpoint_id="weights/x", kind="weights", name="x")
        method = next(iter(route.methods))
        answer = httpx.request(method, f"{server.url}{path}", content=b"{", trust_env=False)
        if route.path_format in PUBLIC:
            assert answer.status_code == 200, path
        else:
            assert answer.status_code == 401, path
            answers.add(answer.text)
    assert len(answers) == 1


def test_any_token_and_header(server: Server) -> None:
    session = Caller(server.url, "EMPTY_TOKEN").session()
    for headers in (
        {"Authorization": "Bearer EMPTY_TOKEN"},
        {"Twinkle-Authorization": "EMPTY_TOKEN"},
        {"X-API-Key": "EMPTY_TOKEN"},
        {"Authorization": "Bearer EMPTY_TOKEN", "Twinkle-Authorization": "Bearer EMPTY_TOKEN", "x-request-id": "1"},
    ):
        answer = httpx.post(
            f"{server.url}/api/v1/twinkle/session_heartbeat",
            json={"session_id": session},
            headers=headers,
            trust_env=False,
        )
        assert answer.status_code == 200, headers
