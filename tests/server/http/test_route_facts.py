"""The facts declared with each route, and that the application and Ray's addressing follow them."""

import json
import re

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.routing import Match

from twinkle.server.app import ROUTES, make_app
from twinkle.server.http import owners
from twinkle.server.http.asgi_relay import HttpRequest
from twinkle.server.http.owners import (
    OfModel,
    OfNewRun,
    OfNewSampler,
    OfOpenAiModel,
    OfProcessors,
    OfRun,
    OfSampler,
)
from twinkle.server.http.routes import Route
from twinkle.server.runtime.ray.directory import destination_of
from twinkle_client.protocol.base import SESSION_HEADER

RUN = "s-1:train:0"
SESSION = "session_" + "0" * 32
# A body with a value for every kind of owner.
BODY = {
    "model_id": RUN,
    "request_id": f"{RUN}:1",
    "sampling_session_id": "s-1:sample:0",
    "session_id": "s-1",
    "model_seq_id": 0,
    "sampling_session_seq_id": 0,
    "model": "m",
    "adapter_name": "a",
}
PATH = {"model": "org/name", "run_id": RUN}
# The address that Ray must find for a route of each owner.
ADDRESSES = {
    owners.anybody: None,
    owners.by_model_id: OfRun(RUN),
    owners.by_new_model: OfNewRun(RUN, None),
    owners.by_run_in_path: OfRun(RUN),
    owners.by_request_id: OfRun(RUN),
    owners.by_sampling_session: OfSampler("s-1:sample:0"),
    owners.by_new_sampling_session: OfNewSampler("s-1:sample:0", None, None),
    owners.by_base_model: OfModel("org/name"),
    owners.by_first_replica: OfModel("org/name", first=True),
    owners.by_adapter: OfRun(f"{SESSION}-a", "org/name"),
    owners.by_new_adapter: OfNewRun(f"{SESSION}-a", "org/name"),
    owners.by_sampled_weights: OfRun(f"{SESSION}-a", "org/name"),
    owners.by_processors: OfProcessors(SESSION),
}
ROUTE_IDS = [f"{'/'.join(route.methods)} {route.endpoint.path}" for route in ROUTES.routes]


@pytest.fixture(scope="module")
def app() -> FastAPI:
    return make_app(lambda _app: None)  # type: ignore[arg-type,return-value]  # it is never started


def example(route: Route) -> HttpRequest:
    path = re.sub(r"\{(\w+)\}", lambda match: PATH.get(match[1], "x"), route.endpoint.path_format)
    (method,) = route.methods
    headers = ((SESSION_HEADER.encode(), SESSION.encode()),)
    return HttpRequest(method, path, b"", headers, json.dumps(BODY).encode(), None)


def test_every_route_of_the_application_has_facts(app: FastAPI) -> None:
    """Except OpenAPI's page, which FastAPI adds."""
    declared = {id(route.endpoint) for route in ROUTES.routes}
    others = [route for route in app.routes if id(route) not in declared]
    assert [route.path for route in others] == ["/openapi.json"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("route", ROUTES.routes, ids=ROUTE_IDS)
def test_ray_finds_the_route_that_answers(app: FastAPI, route: Route) -> None:
    """The table tries paths without parameters first, the application tries routes in their order: both must agree."""
    asked = example(route)
    scope = {"type": "http", "method": asked.method, "path": asked.path, "root_path": "", "headers": []}
    answering = next(each for each in app.routes if each.matches(scope)[0] is Match.FULL)
    assert answering is route.endpoint
    facts, parameters = ROUTES.find(asked.method, asked.path)
    assert facts is route.facts
    assert set(parameters) == set(route.endpoint.param_convertors)


@pytest.mark.parametrize("route", ROUTES.routes, ids=ROUTE_IDS)
def test_ray_sends_a_request_to_the_owner_of_its_route(route: Route) -> None:
    found = destination_of(example(route), 2**20)
    if route.facts.owner is owners.by_openai_model:  # the model's name is in the path or in the body
        assert found.address == OfOpenAiModel("org/name" if route.endpoint.param_convertors else "m")
    else:
        assert found.address == ADDRESSES[route.facts.owner]


def test_openapi_describes_the_bodies_that_are_declared(app: FastAPI) -> None:
    paths = app.openapi()["paths"]
    for route in ROUTES.routes:
        assert isinstance(route.endpoint, APIRoute)
        for method in route.methods:
            body = paths[route.endpoint.path_format][method.lower()].get("requestBody")
            assert (body is None) == (route.facts.schema is None), route.endpoint.path
    (protobuf,) = paths["/api/v1/forward_backward"]["post"]["requestBody"]["content"]
    assert protobuf == "application/x-protobuf"


def test_what_only_watches_the_server_is_not_traced() -> None:
    watching = ("healthz", "healthz/deep", "status", "session_heartbeat", "telemetry", "model/org/name/healthz")
    for path in ["/metrics", *(f"/api/v1/{each}" for each in watching)]:
        assert not any(ROUTES.is_traced(method, path) for method in ("GET", "POST") if is_route(method, path)), path
    assert ROUTES.is_traced("POST", "/api/v1/forward_backward")


def is_route(method: str, path: str) -> bool:
    return any(
        method in route.methods and route.endpoint.path_regex.fullmatch(path) is not None for route in ROUTES.routes
    )


def test_which_paths_answer_any_host() -> None:
    assert ROUTES.for_any_host == {"/api/v1/healthz", "/api/v1/twinkle/healthz", "/-/healthz", "/metrics"}
