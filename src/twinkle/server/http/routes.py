"""Declaring routes: every fact about a route is declared once, together with its handler.

OpenAPI, the limits of bodies, tracing, the check of Host headers and the routing on Ray all read these facts. A route
can only be declared with an owner, and the application takes its routes from :class:`RouteTable`, so that they all have
facts; only FastAPI's own /openapi.json has none.
"""

import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Set
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import ClientDisconnect

from twinkle.server.gateway.gateway import Gateway
from twinkle.server.http.owners import Owner, Streams, anybody, never_streams
from twinkle.server.http.requests import JSON_BYTES, body_of, decoded, gateway_of, tenant_of
from twinkle.server.wire import fields

T = TypeVar("T")
P = ParamSpec("P")
ModelT = TypeVar("ModelT", bound=BaseModel)
Schema = type[BaseModel] | str | None


@dataclass(frozen=True)
class RouteFacts:
    """The facts about a route that other parts of the server read.

    owner: finds the replica that answers, on Ray.
    schema: the body in OpenAPI: a type, the media type of a body that is not JSON, or None.
    limit: the most bytes of a body; None: only the limit for all requests applies (``limits.max_request_bytes``).
    ends_with_client: whether the work may be cancelled when its client disconnects, because it reads, waits or samples
    only for that client. Work of other requests is finished once it has begun: otherwise an op could be journalled and
    never run.
    soon: whether a replica always answers within half a minute. After that time a relaying process gives up, because
    the replica must be down.
    streams: whether a relaying process passes the answer on in parts, as they come.
    traced: whether requests have spans. Requests that only monitor the server have none.
    any_host: whether every Host header is accepted. Such a route only says that the server is up, or has other checks.
    """

    owner: Owner
    schema: Schema = None
    limit: int | None = JSON_BYTES
    ends_with_client: bool = False
    soon: bool = False
    streams: Streams = never_streams
    traced: bool = True
    any_host: bool = False


# The facts of paths without a declared route: any process answers, mostly with 404.
NO_ROUTE = RouteFacts(anybody, limit=4 * JSON_BYTES, ends_with_client=True)


@dataclass(frozen=True)
class Body(Generic[T]):
    """How the body of a request is decoded for its handler.

    read: decodes the bytes, in a thread if the body is large or compressed; None: the handler gets the bytes.
    by_handler: the body is not read before the handler runs. The handler may read it itself, within the same limit.
    """

    read: Callable[[bytes], T] | None
    schema: Schema = None
    limit: int | None = JSON_BYTES
    by_handler: bool = False


def json_body(model: type[ModelT], limit: int = JSON_BYTES) -> Body[ModelT]:
    """Declare a JSON body, which is parsed and checked against a type."""
    return Body(partial(fields.parse, model), model, limit)


def raw_body(schema: Schema = None, limit: int | None = JSON_BYTES) -> Body[bytes]:
    """Declare a body that the handler decodes, because it journals the bytes or looks something up first."""
    return Body(None, schema, limit)


def unread_body(limit: int | None = JSON_BYTES) -> Body[bytes]:
    """Declare a body that the handler reads itself, or that is not read at all."""
    return Body(None, None, limit, by_handler=True)


@dataclass(frozen=True)
class Call(Generic[T]):
    """One request as handlers get it.

    ``tenant_id`` is empty on public routes. ``raw``: the bytes of the body, empty if the handler reads it. ``body``:
    the decoded body.
    """

    request: Request
    gateway: Gateway
    tenant_id: str
    raw: bytes
    body: T


Handler = Callable[Concatenate[Call[T], P], Awaitable[Response]]
AnswerError = Callable[[Request, Exception], Response]


class Decorator(Protocol[T]):
    """A decorator that declares a handler and returns it unchanged."""

    def __call__(self, handler: Handler[T, P], /) -> Handler[T, P]: ...


@dataclass(frozen=True)
class Route:
    """A route of the application with its facts."""

    endpoint: APIRoute
    facts: RouteFacts

    @property
    def methods(self) -> Set[str]:
        return self.endpoint.methods or frozenset()


class _PlainRoute(APIRoute):
    """A route that skips FastAPI's parsing of parameters if the request is the endpoint's only parameter."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        if list(inspect.signature(self.endpoint).parameters) == ["request"]:
            return self.endpoint
        return super().get_route_handler()


class Routes:
    """The routes of one area of the API, declared by decorators.

    A decorated handler stays a plain function: it may be decorated with several paths, and may be called directly.
    Except on public routes, the tenant is identified before the body is read. The parameters of a handler after its
    :class:`Call` are parameters of path and query, which FastAPI reads.
    """

    def __init__(self, prefix: str = "", *, key_prefix: str = "tml-", answer_error: AnswerError | None = None) -> None:
        """Prepare an area without routes.

        key_prefix: how keys must begin. A request with our header Twinkle-Authorization may have any key.
        answer_error: writes errors in the format of this area; None: the application's error handlers do.
        """
        self.declared: list[Route] = []
        self._router = APIRouter(prefix=prefix, route_class=_PlainRoute)
        self._key_prefix = key_prefix
        self._answer_error = answer_error

    def get(
        self, path: str, owner: Owner, *, public: bool = False, traced: bool = True, any_host: bool = False
    ) -> Decorator[bytes]:
        """Declare a route that only reads, and may be cancelled if its client disconnects.

        ``public``: no key is needed, or the handler checks it.
        """
        facts = RouteFacts(owner, ends_with_client=True, traced=traced, any_host=any_host)
        return self._handling("GET", path, facts, None, public)

    def delete(self, path: str, owner: Owner, *, public: bool = False) -> Decorator[bytes]:
        """Declare a route that deletes something. No body is read. ``public``: the handler checks the key."""
        return self._handling("DELETE", path, RouteFacts(owner), None, public)

    def put(self, path: str, owner: Owner, body: Body[T]) -> Decorator[T]:
        """Declare a route that changes something."""
        return self._handling("PUT", path, RouteFacts(owner, body.schema, body.limit), body, public=False)

    def post(
        self,
        path: str,
        owner: Owner,
        body: Body[T],
        *,
        public: bool = False,
        ends_with_client: bool = False,
        soon: bool = False,
        streams: Streams = never_streams,
        traced: bool = True,
    ) -> Decorator[T]:
        """Declare a POST route. ``public``: no key is needed, or the handler checks it. Others: :class:`RouteFacts`."""
        facts = RouteFacts(owner, body.schema, body.limit, ends_with_client, soon, streams, traced)
        return self._handling("POST", path, facts, body, public)

    def _handling(
        self, method: str, path: str, facts: RouteFacts, body: Body[Any] | None, public: bool
    ) -> Decorator[Any]:
        def declare(handler: Handler[Any, P]) -> Handler[Any, P]:
            async def endpoint(request: Request, *args: P.args, **parameters: P.kwargs) -> Response:
                try:
                    tenant_id = "" if public else await tenant_of(request, self._key_prefix)
                    raw = b"" if body is None or body.by_handler else await body_of(request, body.limit)
                    content = raw if body is None or body.read is None else await decoded(request, raw, body.read)
                    call = Call(request, gateway_of(request), tenant_id, raw, content)
                    return await handler(call, *args, **parameters)
                except Exception as error:
                    if self._answer_error is None or isinstance(error, ClientDisconnect):
                        raise
                    return self._answer_error(request, error)

            update_wrapper(endpoint, handler)
            # FastAPI finds parameters by the signature: show it the handler's, with the request instead of the call.
            first, *others = inspect.signature(handler).parameters.values()
            of_request = first.replace(name="request", annotation=Request)
            endpoint.__signature__ = inspect.Signature([of_request, *others], return_annotation=Response)  # type: ignore[attr-defined]
            self._router.add_api_route(path, endpoint, methods=[method])
            added = self._router.routes[-1]
            assert isinstance(added, APIRoute)
            self.declared.append(Route(added, facts))
            return handler

        return declare


class RouteTable:
    """All routes of the application, in the order in which they are matched."""

    def __init__(self, areas: Iterable[Routes]) -> None:
        self.routes = [route for area in areas for route in area.declared]
        # Most requests go to paths without parameters: a dict finds those without trying one pattern after the other.
        self._plain: dict[tuple[str, str], Route] = {}
        self._patterns: list[tuple[str, Route]] = []
        for route in self.routes:
            for method in route.methods:
                if route.endpoint.param_convertors:
                    self._patterns.append((method, route))
                else:
                    self._plain.setdefault((method, route.endpoint.path), route)

    def find(self, method: str, path: str) -> tuple[RouteFacts, Mapping[str, str]]:
        """Return the facts of the route that matches, and the parameters in its path; NO_ROUTE if none matches."""
        plain = self._plain.get((method, path))
        if plain is not None:
            return plain.facts, {}
        for of_method, route in self._patterns:
            if of_method == method and (match := route.endpoint.path_regex.match(path)) is not None:
                return route.facts, match.groupdict()
        return NO_ROUTE, {}

    def is_traced(self, method: str, path: str) -> bool:
        return self.find(method, path)[0].traced

    @property
    def for_any_host(self) -> frozenset[str]:
        """Return the paths of routes that accept every Host header."""
        return frozenset(route.endpoint.path for route in self.routes if route.facts.any_host)
