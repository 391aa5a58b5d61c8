"""Serve's proxies without an application tell clients to try again."""

from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from twinkle.server.runtime.ray.proxy_answers import PROXY_CALLBACK, middlewares


def serves_own(_request: Any) -> PlainTextResponse:
    return PlainTextResponse("Path '/x' not found. Ping http://.../-/routes for available routes.", 404)


def ours(_request: Any) -> JSONResponse:
    return JSONResponse({"detail": "no such model"}, 404)


@pytest.fixture
def client() -> TestClient:
    routes = [Route("/-/routes", serves_own), Route("/ours", ours), Route("/{path:path}", serves_own)]
    return TestClient(Starlette(routes=routes, middleware=middlewares()))


def test_no_application_is_no_end(client: TestClient) -> None:
    answer = client.get("/api/v1/retrieve_futures")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert "try again" in answer.json()["detail"]


def test_other_answers_stay_as_they_are(client: TestClient) -> None:
    assert (client.get("/ours").status_code, client.get("/ours").json()["detail"]) == (404, "no such model")
    assert client.get("/-/routes").status_code == 404


@pytest.mark.parametrize(
    ("server", "host", "status"),
    [
        ("127.0.0.1", "rebound.example:8000", 400),
        ("127.0.0.1", "rebound.example", 400),
        ("127.0.0.1", "", 400),
        ("127.0.0.1", "localhost:8000", 404),
        ("127.0.0.1", "127.0.0.1", 404),
        ("127.0.0.1", "[::1", 400),
        ("::1", "[::1]:8000", 404),
        ("::1", "[::1]", 404),
        ("10.0.0.1", "a.example", 404),
    ],
)
def test_a_rebound_name_does_not_read_serves_routes(server: str, host: str, status: int) -> None:
    routes = [Route("/-/routes", serves_own), Route("/-/healthz", lambda _: PlainTextResponse("success"))]
    app = Starlette(routes=routes, middleware=middlewares())

    async def at(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "server": (server, 8000)}, receive, send)

    client = TestClient(at)
    assert client.get("/-/routes", headers={"host": host}).status_code == status
    assert client.get("/-/healthz", headers={"host": host}).status_code == 200


def test_serve_finds_it() -> None:
    module, _, name = PROXY_CALLBACK.rpartition(".")
    assert getattr(__import__(module, fromlist=[name]), name) is middlewares
