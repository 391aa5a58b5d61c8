"""Helpers that all handlers share: the gateway, the caller, the body, JSON answers, and errors as status codes."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import TypeVar
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from twinkle.errors import (
    CapacityError,
    ForbiddenError,
    GoneError,
    InvalidInputError,
    NotFoundError,
    OverloadedError,
    QuotaError,
    ShuttingDownError,
    TwinkleError,
    UnauthorizedError,
    UserError,
)
from twinkle.server.config.applications import GATEWAY_PREFIX
from twinkle.server.config.sections import leads_to_this_machine
from twinkle.server.gateway.gateway import Gateway
from twinkle.server.gateway.identity import FROM_VARIABLES, KeyDescription
from twinkle.server.http.body_limits import read_body, upload_of
from twinkle.server.state.errors import DatabaseUnavailableError, ReplicaHeldError, StorageFullError
from twinkle.server.telemetry.http import REQUEST_ID_HEADER
from twinkle.server.telemetry.logs import current_request, note_refusing_limit
from twinkle.server.wire.errors import BodyTooLargeError, SequenceConflictError

logger = logging.getLogger(__name__)

PREFIX = GATEWAY_PREFIX
# Bodies below this are decoded on the event loop, in a fraction of a millisecond; larger ones in a thread.
SMALL_BODY = 16_384
_BEARER = "bearer"
# Headers by which a proxy shows that it forwards a request.
_FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip", "via")
_REMEMBERED_HOSTS = 100
_SHOWN_PATH = 200  # characters of an unknown path that the answer repeats
# The JSON parser holds the interpreter lock: 1 MiB takes some 50 ms; 64 MiB took seconds, and a gigabyte of memory.
JSON_BYTES = 2**20
T = TypeVar("T")

# The status of each kind of error: the first entry that matches counts. Others are a 500; a full disk is a 507.
_STATUS: tuple[tuple[type[TwinkleError], int], ...] = (
    (UnauthorizedError, 401),
    (ForbiddenError, 403),
    (NotFoundError, 404),
    (GoneError, 410),
    (SequenceConflictError, 409),
    (ReplicaHeldError, 409),
    (BodyTooLargeError, 413),
    (QuotaError, 429),
    (OverloadedError, 503),
    (UserError, 400),
    (CapacityError, 503),
    (ShuttingDownError, 503),
    (DatabaseUnavailableError, 503),
)


def gateway_of(request: Request) -> Gateway:
    gateway: Gateway = request.scope["app"].state.gateway
    return gateway


async def tenant_of(request: Request, prefix: str = "tml-") -> str:
    """Return the tenant of the caller's key. If the body is read, it counts among this tenant's uploads."""
    tenant_id = (await _identified(request, prefix)).tenant_id
    upload_of(request).belongs_to(tenant_id)
    return tenant_id


async def key_id_of(request: Request) -> str | None:
    """Return the id of the caller's key, or of the key that its token stands for; None in open mode."""
    return (await _identified(request, "tml-")).key_id


async def _identified(request: Request, prefix: str) -> KeyDescription:
    # Tinker's SDK sends only keys that begin with tml-, unless our init_tinker_client lifted that check. A client that
    # was made with it also sends our own header, and then any key is accepted.
    any_key = "twinkle-authorization" in request.headers
    return await gateway_of(request).identity.identify(key_of(request), "" if any_key else prefix)


def key_of(request: Request) -> str | None:
    """Return the key of a request. Tinker's SDK sends X-API-Key; people and our own client use the other headers."""
    key = request.headers.get("x-api-key")
    for name in ("twinkle-authorization", "authorization"):
        key = bearer_of(request, name) if key is None else key
    return key


def bearer_of(request: Request, header: str = "authorization") -> str | None:
    """Return the key in an Authorization header: after ``Bearer``, or alone, as people and some scripts send it.

    Other schemes are refused: a browser may add ``Basic`` on its own, and those credentials are not keys.
    """
    value = request.headers.get(header)
    if value is None:
        return None
    scheme, space, rest = value.strip().partition(" ")
    if scheme.lower() == _BEARER:
        return rest.strip()
    if space:
        wanted = f"an API key (tml-…), alone or after Bearer; {scheme[:20]!r} is another scheme; {FROM_VARIABLES}"
        raise UnauthorizedError(wanted)
    return scheme


def refuse_rebinding(request: Request) -> None:
    """Raise InvalidInputError if the request may come from a DNS rebinding attack.

    In such an attack a web page lets its own host name point to this machine, and the browser of a visitor calls this
    server for the page. Where any key is accepted and only this machine can connect, the Host header must therefore
    be a name of this machine, or the host of ``public_url``.
    """
    config, host = gateway_of(request).config, request.url.hostname or ""
    if config.auth_mode == "open" and config.http_options.is_loopback and not leads_to_this_machine(host):
        public = None if config.public_url is None else urlsplit(config.public_url).hostname
        if host != public:
            raise InvalidInputError("Host header", host, "localhost, 127.0.0.1 or the host of public_url")


async def body_of(request: Request, most: int | None = None) -> bytes:
    """Return the whole body; BodyTooLargeError above the limit for all requests or above ``most`` bytes.

    It counts among its tenant's uploads until the request is answered, so call :func:`tenant_of` first.
    """
    gateway, upload = gateway_of(request), upload_of(request)
    of_tenant = gateway.tenants.limits(upload.tenant_id).max_uploading_bytes_per_tenant
    # When memory is short, long bodies are refused on routes that allow more than 4 MiB. Heartbeats, polls and deletes
    # still pass.
    is_work = most is None or most > 4 * JSON_BYTES
    unchecked = SMALL_BODY if "content-length" in request.headers else 0

    def grow_to(size: int) -> None:
        if is_work and size - upload.size > unchecked:
            gateway.memory.guard.check(size - upload.size)
        upload.grow_to(size, of_tenant)

    limit = gateway.config.limits.max_request_bytes
    return await read_body(request, limit if most is None else min(limit, most), grow_to)


async def decoded(request: Request, body: bytes, read: Callable[[bytes], T]) -> T:
    """Return ``read(body)``: a small body is decoded on the event loop, a large or compressed one in a thread.

    The threads are those of the pool for reading, which all tenants share fairly.
    """
    if len(body) < SMALL_BODY and "content-encoding" not in request.headers:
        return read(body)
    return await gateway_of(request).reading.in_thread(upload_of(request).tenant_id, partial(read, body))


def json_response(
    content: Mapping[str, object], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(json.dumps(content, allow_nan=False), status, headers, media_type="application/json")


def listing(name: str, items: Sequence[object], offset: int, limit: int, total: int) -> Response:
    """Return one page of a listing, with its offset and the total number of items."""
    return json_response({name: items, "cursor": {"offset": offset, "limit": limit, "total_count": total}})


def public_address(request: Request) -> str:
    """Return the server's URL for the caller: ``public_url``, or else the one that this request used."""
    return gateway_of(request).config.public_url or str(request.base_url).rstrip("/")


def iso_time(seconds: float) -> str:
    """Return a time in ISO format with its time zone: the SDK compares it with times that have one."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def is_local(request: Request) -> bool:
    """Return whether the caller is on this machine.

    A proxy on this machine would make every caller look local. Therefore no caller counts as local if a public_url is
    configured, the request has a header of a proxy, or its Host header is not a name of this machine.
    """
    if gateway_of(request).config.public_url is not None or any(name in request.headers for name in _FORWARDED):
        return False
    on_loopback = request.client is None or request.client.host in ("127.0.0.1", "::1")
    return on_loopback and leads_to_this_machine(request.url.hostname or "")


def when_to_retry(error: Exception, status: int) -> Mapping[str, str] | None:
    """Return the Retry-After header for errors that may pass soon, None for others. Both SDKs respect it."""
    if isinstance(error, QuotaError | OverloadedError):
        return {"Retry-After": str(error.retry_after)}
    return {"Retry-After": "1"} if status in (429, 503) else None


def status_of(error: TwinkleError) -> int:
    """Return the HTTP status of an error; 500 if its type is not listed in ``_STATUS``."""
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def note_refusal(error: Exception) -> None:
    """Count the request for /metrics, if the error says that a limit refused it."""
    if isinstance(error, QuotaError | OverloadedError | BodyTooLargeError):
        note_refusing_limit(error.key)


class RefuseRebinding:
    """ASGI middleware that applies :func:`refuse_rebinding` to every path except those in ``for_any_host``."""

    def __init__(self, app: ASGIApp, for_any_host: frozenset[str]) -> None:
        self._app = app
        self._for_any_host = for_any_host
        self._fine: set[bytes] = set()  # Host headers that passed the check, such as b"localhost:8000"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and scope["path"] not in self._for_any_host:
            header = next((value for name, value in scope["headers"] if name == b"host"), b"")
            if header not in self._fine:
                try:
                    refuse_rebinding(Request(scope))
                    if len(self._fine) < _REMEMBERED_HOSTS:
                        self._fine.add(header)
                except InvalidInputError as error:
                    app = json_response({"detail": str(error)}, 400)
        await app(scope, receive, send)


def install_error_handlers(app: FastAPI) -> None:
    """Make the application answer errors with a status and a text in JSON; unexpected errors without details."""

    async def expected(request: Request, error: Exception) -> Response:
        assert isinstance(error, TwinkleError)
        note_refusal(error)
        if isinstance(error, StorageFullError):  # its message names the server's directories
            logger.error("%s %s: %s", request.method, request.url.path, error)
            return json_response({"detail": "the server's disk is full: nothing was kept, try again later"}, 507)
        status = status_of(error)
        if status == 500:
            return await unexpected(request, error)
        code = {} if error.code is None else {"code": error.code}
        return json_response({"detail": str(error), **code}, status, when_to_retry(error, status))

    async def unexpected(request: Request, error: Exception) -> Response:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        context = current_request()  # this handler is outside of the middleware that adds the id to answers
        headers = None if context is None else {REQUEST_ID_HEADER: context.http_id}
        return json_response({"detail": "internal error; the server's log has the details"}, 500, headers)

    async def invalid(_request: Request, error: Exception) -> Response:
        """Answer the first mistake in the path or the query with 400. FastAPI does not read bodies here."""
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        value = repr(first["input"])[:120]
        return json_response({"detail": f"{first['loc'][-1]}: got {value}, {first['msg']}"}, 400)

    async def no_route(request: Request, _error: Exception) -> Response:
        """Answer a path without a route. Handlers raise NotFoundError instead, which has its own answer."""
        where = f"{request.method} {request.url.path[:_SHOWN_PATH]}"
        return json_response({"detail": f"{where}: there is no such route; /openapi.json lists all"}, 404)

    async def gone(request: Request, _error: Exception) -> Response:
        """Answer a client that disconnected in the middle of a request. It will not read this; it is not an error."""
        logger.debug("%s %s: the client is gone", request.method, request.url.path)
        return Response(status_code=400)

    app.add_exception_handler(404, no_route)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(TwinkleError, expected)
    app.add_exception_handler(Exception, unexpected)
