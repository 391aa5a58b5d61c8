"""Paths of earlier versions: each leads to today's route, with the same checks, and to nothing else."""

import json
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.support.servers.running import MODEL, Server, Tenant, training_body
from twinkle.server.app import OLDER_PATHS, ROUTES
from twinkle.server.http import older_paths

SESSION = "X-Twinkle-Session-Id"


@pytest.fixture
def http(server: Server, tenant: Tenant) -> httpx.Client:
    headers = {"Authorization": f"Bearer {tenant.key}"}
    return httpx.Client(base_url=server.url, headers=headers, timeout=60, trust_env=False, verify=False)


def is_served(name: str) -> bool:
    return name == "a/b"


def today(method: str, path: str) -> str:
    scope = OLDER_PATHS.in_todays_form({"method": method, "path": path, "raw_path": path.encode()}, is_served)
    assert scope["raw_path"] == scope["path"].encode()
    return str(scope["path"])


# --- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "older", "expected"),
    [
        ("GET", "/server/training_runs", "/api/v1/twinkle/training_runs"),
        ("POST", "/server/create_session", "/api/v1/twinkle/create_session"),
        ("POST", "/server/create_model", "/api/v1/create_model"),
        ("GET", "/server/api/v1/training_runs", "/api/v1/training_runs"),
        ("GET", "/server/twinkle/healthz", "/api/v1/twinkle/healthz"),
        ("POST", "/models/a/b/forward_backward", "/api/v1/model/a/b/twinkle/forward_backward"),
        ("POST", "/models/a/b/twinkle/step", "/api/v1/model/a/b/twinkle/step"),
        ("POST", "/models/a/b/tinker/optim_step", "/api/v1/optim_step"),
        ("GET", "/models/a/b/healthz", "/api/v1/model/a/b/healthz"),
        ("GET", "/models/a/b/upload_status/7", "/api/v1/model/a/b/twinkle/upload_status/7"),
        ("POST", "/samplers/a/b/sample", "/api/v1/sampler/a/b/twinkle/sample"),
        ("POST", "/samplers/a/b/twinkle/create", "/api/v1/sampler/a/b/twinkle/create"),
        ("POST", "/samplers/a/b/tinker/asample", "/api/v1/asample"),
        ("POST", "/processors/create", "/api/v1/processor/twinkle/create"),
        ("POST", "/processors/twinkle/call", "/api/v1/processor/twinkle/call"),
        ("POST", "/twinkle/create_session", "/api/v1/twinkle/create_session"),
        ("POST", "/tinker/create_session", "/api/v1/create_session"),
        ("GET", "/tinker/training_runs/s:train:0", "/api/v1/training_runs/s:train:0"),
        ("POST", "/api/v1/tinker/forward", "/api/v1/forward"),
        ("POST", "/api/v1/model/a/b/tinker/forward", "/api/v1/forward"),
        ("POST", "/api/v1/sampler/a/b/tinker/asample", "/api/v1/asample"),
        ("POST", "/oai/api/v1/chat/completions", "/v1/chat/completions"),
        ("GET", "/oai/api/v1/models/tinker://a/weights/b", "/v1/models/tinker://a/weights/b"),
        ("POST", "/anthropic/api/v1/messages", "/anthropic/v1/messages"),
        ("POST", "/anthropic/api/v1/messages/count_tokens", "/anthropic/v1/messages/count_tokens"),
    ],
)
def test_each_form_has_its_route(method: str, older: str, expected: str) -> None:
    assert today(method, older) == expected
    assert ROUTES.find(method, expected)[0] is not older_paths.NO_ROUTE
    assert today(method, expected) == expected, "today's path stays, so a path may be converted twice"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/server/metrics"),  # nothing outside of /api/v1 can be reached
        ("GET", "/server/dashboard"),
        ("GET", "/server/../metrics"),
        ("GET", "/server//metrics"),
        ("GET", "/tinker/../dashboard"),
        ("GET", "/server/nonsense"),
        ("GET", "/server/"),
        ("GET", "/server"),
        ("GET", "/models/a/b/forward_backward"),  # a verb is a POST
        ("POST", "/models/"),
        ("POST", "/processors/nonsense"),
        ("POST", "/tinker/nonsense"),
        ("POST", "/twinkle/nonsense"),
        ("POST", "/api/v1/model/unknown/tinker/forward"),
        ("GET", "/oai/api/v1/status"),
        ("GET", "/oai/api/v1/../dashboard"),
        ("POST", "/oai/v1/chat/completions"),
        ("POST", "/anthropic/api/messages"),
        ("POST", "/servers/create_session"),
        ("POST", "/server/" + "x/" * 4096 + "create_session"),
    ],
)
def test_others_stay_as_they_are(method: str, path: str) -> None:
    assert today(method, path) == path
    assert ROUTES.find(method, path)[0] is older_paths.NO_ROUTE


@pytest.mark.parametrize("character", ["\n", "\r", "\0", "\x7f", "\u2028"])
def test_no_form_has_control_characters(character: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matching them would take time that grows with the square of the path's length, before any key is checked."""
    for path in ("/models/a/b/tinker/optim_step", "/tinker/forward", "/server/create_session"):
        assert today("POST", path) != path
        assert today("POST", path + character) == path + character
    tried = []
    form = older_paths.OlderPath("/models/{model:path}/tinker/{op:path}", ("/api/v1/{op}",))
    monkeypatch.setattr(older_paths.OlderPath, "pattern", property(tried.append))
    paths = older_paths.OlderPaths(ROUTES, (form,))
    scope = {"method": "GET", "path": "/models" + "/tinker" * 570 + f"/{character}{character}"}
    assert paths.in_todays_form(scope, is_served) is scope
    assert not tried


def test_no_route_of_today_has_two_parts_of_any_length() -> None:
    """A path with a line break, which is compared with each route, would take long to be refused by such a route."""
    assert all(route.endpoint.path.count(":path}") <= 1 for route in ROUTES.routes)


@pytest.mark.parametrize("route", ROUTES.routes, ids=lambda route: f"{min(route.methods)} {route.endpoint.path}")
def test_no_route_of_today_is_an_older_path(route: Any) -> None:
    path = re.sub(r"\{[^}]*\}", "x", route.endpoint.path)
    assert all(today(method, path) == path for method in route.methods)


# --- real requests ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "forms",
    [
        lambda path: f"/server/{path}",
        lambda path: f"/twinkle/{path}",
    ],
)
def test_the_gateway_of_the_native_protocol(http: httpx.Client, forms: Callable[[str], str]) -> None:
    session = http.post(forms("create_session"), json={}).json()["session_id"]
    assert http.post(forms("session_heartbeat"), json={"session_id": session}).json() == {}
    assert http.get(forms("training_runs")).json() == http.get("/api/v1/twinkle/training_runs").json()
    assert http.get(forms("healthz")).json() == {"status": "ok"}


@pytest.mark.parametrize("prefix", ["/tinker", "/api/v1/tinker", "/server/api/v1", "/server"])
def test_tinkers_protocol(http: httpx.Client, tenant: Tenant, prefix: str) -> None:
    """A whole step, with the bodies and answers of today's routes."""
    session = tenant.session()
    body = {"session_id": session, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 8}}
    made = http.post(f"{prefix}/create_model", json=body).json()
    tenant.json(made["request_id"])
    content, kind = training_body(made["model_id"], 1), {"Content-Type": "application/x-protobuf"}
    if prefix == "/tinker":
        prefix = f"/models/{MODEL}/tinker"  # the same op by the path of its model
    op = http.post(f"{prefix}/forward_backward", content=content, headers=kind).json()
    assert tenant.loss(op["request_id"])


def test_models_and_samplers(http: httpx.Client) -> None:
    session = http.post("/server/create_session", json={}).json()["session_id"]
    http.headers[SESSION] = session
    assert http.post(f"/models/{MODEL}/create", json={}).json() == {"status": "ok", "train_mode": "lora"}
    adapter = {"adapter_name": "default", "config": json.dumps({"r": 8, "target_modules": "all-linear"})}
    answer = http.post(f"/models/{MODEL}/add_adapter_to_model", json=adapter)
    assert answer.status_code == 200, answer.text
    assert answer.json()["adapter_name"] == f"{session}-default"
    assert http.post(f"/models/{MODEL}/zero_grad", json={"adapter_name": "default"}).status_code == 200
    assert http.get(f"/models/{MODEL}/healthz").status_code == 200
    assert http.post(f"/samplers/{MODEL}/create", json={}).json() == {"status": "ok"}
    sampled = {"inputs": [{"input_ids": [1, 2]}], "sampling_params": {"max_tokens": 2}}
    assert len(http.post(f"/samplers/{MODEL}/sample", json=sampled).json()["samples"]) == 1


def test_processors(http: httpx.Client) -> None:
    """This server has none, and says so as it does on today's path."""
    answers = [http.post(path, json={}) for path in ("/processors/create", "/api/v1/processor/twinkle/create")]
    assert answers[0].status_code == answers[1].status_code != 404
    assert answers[0].json() == answers[1].json()


# --- the same checks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/server/nonsense"),
        ("POST", "/models/nonsense"),
        ("GET", "/samplers/nonsense"),
        ("POST", "/processors/nonsense"),
        ("POST", "/tinker/nonsense"),
        ("POST", "/twinkle/nonsense"),
        ("GET", "/nonsense"),
    ],
)
def test_an_unknown_path_is_named_in_the_answer(http: httpx.Client, method: str, path: str) -> None:
    answer = http.request(method, path)
    expected = f"{method} {path}: there is no such route; /openapi.json lists all"
    assert (answer.status_code, answer.json()) == (404, {"detail": expected})


def test_unknown_models_and_verbs(http: httpx.Client) -> None:
    http.headers[SESSION] = http.post("/twinkle/create_session", json={}).json()["session_id"]
    unknown = http.post("/models/org/unknown/forward_backward", json={"adapter_name": "x"})
    assert (unknown.status_code, "org/unknown" in unknown.json()["detail"]) == (404, True)
    older, now = (f"/models/{MODEL}/nonsense", f"/api/v1/model/{MODEL}/twinkle/nonsense")
    answers = [http.post(path, json={"adapter_name": "x"}) for path in (older, now)]
    assert (answers[0].status_code, answers[0].json()) == (answers[1].status_code, answers[1].json())
    assert "nonsense" in answers[0].json()["detail"]


@pytest.mark.parametrize("path", ["/server/create_session", "/tinker/create_session", f"/models/{MODEL}/create"])
def test_a_key_is_needed(server: Server, path: str) -> None:
    answer = httpx.post(f"{server.url}{path}", json={}, trust_env=False)
    assert answer.status_code == 401
    for variable in ("TINKER_API_KEY", "TWINKLE_SERVER_TOKEN"):
        assert variable in answer.json()["detail"]


def test_a_rebound_name_is_refused_as_on_todays_path(server: Server) -> None:
    def asked(path: str) -> int:
        return httpx.get(f"{server.url}{path}", headers={"host": "rebound.example"}, trust_env=False).status_code

    assert asked("/server/status") == asked("/api/v1/twinkle/status") == 400
    assert asked("/server/healthz") == asked("/api/v1/twinkle/healthz") == 200  # it only says that the server is up


@pytest.mark.parametrize("path", ["/server/create_session", "/tinker/create_session"])
def test_the_limit_of_a_body_is_that_of_the_route(http: httpx.Client, path: str) -> None:
    answer = http.post(path, content=b" " * (2**20 + 1))
    assert answer.status_code == 413


def test_metrics_have_todays_routes_alone(http: httpx.Client, server: Server) -> None:
    http.get("/server/training_runs")
    http.get("/server/nonsense")
    text = httpx.get(f"{server.url}/metrics", trust_env=False).text
    routes = set(re.findall(r'route="([^"]*)"', text))
    assert "/api/v1/twinkle/training_runs" in routes
    assert not [route for route in routes if route.startswith(older_paths._PREFIXES)]


def test_a_signed_address_is_todays(http: httpx.Client, tenant: Tenant) -> None:
    run = tenant.model()
    tenant.json(tenant.save(run, 1, "ck"))
    answer = http.get(f"/tinker/training_runs/{run}/checkpoints/weights/ck/archive")
    address = httpx.URL(answer.headers["location"])
    assert (answer.status_code, address.path.startswith("/api/v1/archives/")) == (302, True)
    assert httpx.get(address, trust_env=False).status_code == 200
    by_older = str(address).replace("/api/v1/", "/server/")
    assert httpx.get(by_older, trust_env=False).status_code == 200
    assert httpx.get(by_older[:-3] + "abc", trust_env=False).status_code == 403
