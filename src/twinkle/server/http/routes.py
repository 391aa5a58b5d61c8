"""Declaring routes: what is true of a route is said once, where the route is.

OpenAPI, the limits of bodies, tracing, the check of Host headers and Ray's addressing all read these facts. A route can
only be declared with an owner, and the application takes its routes from :class:`RouteTable` alone: one without facts
does not exist.
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
    """What every part of the server may have to know of a route.

    owner: which replica answers, on Ray.
    schema: what OpenAPI says of the body: a type, a media type of what is not JSON, or nothing.
    limit: bytes that a body may have; None: as many as any (``limits.max_request_bytes``).
    ends_with_client: whether the work ends when its client leaves, because it reads, waits or samples for that client
    alone. Anything else is finished once it has begun: otherwise an op could be journalled, and never run.
    soon: whether the answer comes within half a minute if the replica is there; longer it is not waited for.
    streams: whether the answer is handed on as it comes.
    traced: whether requests have spans. Those that only watch the server have none.
    any_host: whether the Host header may be any: the route says no more than that the server is there, or has checks
    of its own.
    """

    owner: Owner
    schema: Schema = None
    limit: int | None = JSON_BYTES
    ends_with_client: bool = False
    soon: bool = False
    streams: Streams = never_streams
    traced: bool = True
    any_host: bool = False


# Of paths that have no route: any process answers 404, after a body of any length that a route with JSON may have.
NO_ROUTE = RouteFacts(anybody, limit=4 * JSON_BYTES, ends_with_client=True)


@dataclass(frozen=True)
class Body(Generic[T]):
    """How the body of a route becomes what its handler is given.

    ``read`` runs in a thread if the body is large; None: the handler is given the bytes. ``by_handler``: nothing is
    read before the handler runs, which may read the body itself, within the same limit.
    """

    read: Callable[[bytes], T] | None
    schema: Schema = None
    limit: int | None = JSON_BYTES
    by_handler: bool = False


def json_body(model: type[ModelT], limit: int = JSON_BYTES) -> Body[ModelT]:
    """Return a JSON body of one type, which is checked."""
    return Body(partial(fields.parse, model), model, limit)


def raw_body(schema: Schema = None, limit: int | None = JSON_BYTES) -> Body[bytes]:
    """Return a body that the handler decodes: it is part of what is journalled, or something is looked up before."""
    return Body(None, schema, limit)


def unread_body(limit: int | None = JSON_BYTES) -> Body[bytes]:
    """Return a body that the handler reads itself, or that nobody reads."""
    return Body(None, None, limit, by_handler=True)


@dataclass(frozen=True)
class Call(Generic[T]):
    """One request, as handlers see it. ``tenant_id`` is empty on public routes; ``raw``: the bytes of the body."""

    request: Request
    gateway: Gateway
    tenant_id: str
    raw: bytes
    body: T


Handler = Callable[Concatenate[Call[T], P], Awaitable[Response]]
AnswerError = Callable[[Request, Exception], Response]


class Decorator(Protocol[T]):
    """Declares a handler, which it returns as it is."""

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
    """Calls an endpoint whose only parameter is the request directly, without FastAPI's parsing of parameters."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        if list(inspect.signature(self.endpoint).parameters) == ["request"]:
            return self.endpoint
        return super().get_route_handler()


class Routes:
    """The routes of one area. A decorated handler stays as it is: it may have several paths, and may be called.

    The tenant is known before a body is read. Parameters of a handler beside its :class:`Call` are those of path and
    query, as FastAPI reads them.
    """

    def __init__(self, prefix: str = "", *, key_prefix: str = "tml-", answer_error: AnswerError | None = None) -> None:
        """``key_prefix``: what keys begin with where any key is a tenant of its own.

        ``answer_error``: answers errors in the form of this area; None: the application answers them.
        """
        self.declared: list[Route] = []
        self._router = APIRouter(prefix=prefix, route_class=_PlainRoute)
        self._key_prefix = key_prefix
        self._answer_error = answer_error

    def get(
        self, path: str, owner: Owner, *, public: bool = False, traced: bool = True, any_host: bool = False
    ) -> Decorator[bytes]:
        """Declare a route that only reads: it ends with its client. ``public``: it asks for no key."""
        facts = RouteFacts(owner, ends_with_client=True, traced=traced, any_host=any_host)
        return self._handling("GET", path, facts, None, public)

    def delete(self, path: str, owner: Owner, *, public: bool = False) -> Decorator[bytes]:
        """Declare a route that deletes something, without a body."""
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
        """Declare a route that asks for something to be done. :class:`RouteFacts` explains the options."""
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
            # FastAPI asks for parameters by their names and annotations: the handler's, with the request for its call.
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
    """All routes of the application, in the order in which they are tried."""

    def __init__(self, areas: Iterable[Routes]) -> None:
        self.routes = [route for area in areas for route in area.declared]
        # Most requests go to paths without parameters, which are found without trying one pattern after the other.
        self._plain: dict[tuple[str, str], Route] = {}
        self._patterns: list[tuple[str, Route]] = []
        for route in self.routes:
            for method in route.methods:
                if route.endpoint.param_convertors:
                    self._patterns.append((method, route))
                else:
                    self._plain.setdefault((method, route.endpoint.path), route)

    def find(self, method: str, path: str) -> tuple[RouteFacts, Mapping[str, str]]:
        """Return the facts of the route that answers, and the parameters in its path."""
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
        """Return the paths that answer whatever the Host header says."""
        return frozenset(route.endpoint.path for route in self.routes if route.facts.any_host)
