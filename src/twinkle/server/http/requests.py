"""What all handlers share: the gateway, the caller, the body, JSON answers, and how errors become status codes."""

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
from twinkle.server.config.sections import names_this_machine
from twinkle.server.gateway.gateway import Gateway
from twinkle.server.gateway.identity import KeyDescription
from twinkle.server.http.body_limits import read_body, upload_of
from twinkle.server.state.errors import DatabaseUnavailableError, StorageFullError
from twinkle.server.telemetry.http import REQUEST_ID_HEADER
from twinkle.server.telemetry.logs import current_request, note_refusing_limit
from twinkle.server.wire.errors import BodyTooLargeError, SequenceConflictError

logger = logging.getLogger(__name__)

PREFIX = GATEWAY_PREFIX
# Bodies below this are decoded on the event loop, in a fraction of a millisecond; larger ones in a thread.
SMALL_BODY = 16_384
_BEARER = "bearer"
_REMEMBERED_HOSTS = 100
# The JSON parser lets no other thread work meanwhile: this much takes some 50 ms, 64 MiB took seconds and a gigabyte.
JSON_BYTES = 2**20
T = TypeVar("T")

# The first that matches; anything else of ours is a 500.
_STATUS: tuple[tuple[type[TwinkleError], int], ...] = (
    (UnauthorizedError, 401),
    (ForbiddenError, 403),
    (NotFoundError, 404),
    (GoneError, 410),
    (SequenceConflictError, 409),
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
    """Return who asks. The body, if it is read, counts among this tenant's uploads."""
    tenant_id = (await _identified(request, prefix)).tenant_id
    upload_of(request).belongs_to(tenant_id)
    return tenant_id


async def key_id_of(request: Request) -> str | None:
    """Return the id of the caller's key, also where a token stands for it; None where keys are not issued."""
    return (await _identified(request, "tml-")).key_id


async def _identified(request: Request, prefix: str) -> KeyDescription:
    # The SDK sends no other keys than tml-…, unless init_tinker_client let it: that one sends our own header, too.
    any_key = "twinkle-authorization" in request.headers
    return await gateway_of(request).identity.identify(key_of(request), "" if any_key else prefix)


def key_of(request: Request) -> str | None:
    """Return the key of a request. The SDK sends X-API-Key; the other headers are for people and for our client."""
    key = request.headers.get("x-api-key")
    for name in ("twinkle-authorization", "authorization"):
        key = bearer_of(request, name) if key is None else key
    return key


def bearer_of(request: Request, header: str = "authorization") -> str | None:
    """Return the key in an Authorization header: after ``Bearer``, or alone, as people and some scripts send it.

    Other schemes are refused: a browser may send ``Basic`` by itself, and their credentials are no keys.
    """
    value = request.headers.get(header)
    if value is None:
        return None
    scheme, space, rest = value.strip().partition(" ")
    if scheme.lower() == _BEARER:
        return rest.strip()
    if space:
        raise UnauthorizedError(f"an API key (tml-…), alone or after Bearer; {scheme[:20]!r} is another scheme")
    return scheme


def refuse_rebinding(request: Request) -> None:
    """Raise InvalidInputError where the Host header may be that of a web page that gave its name our address.

    Its visitors' browsers would act as tenants here. Where any key will do and only this machine can connect, a
    request must also call us by a name of this machine.
    """
    config, host = gateway_of(request).config, request.url.hostname or ""
    if config.auth.mode == "open" and config.http_options.is_loopback and not names_this_machine(host):
        public = None if config.public_url is None else urlsplit(config.public_url).hostname
        if host != public:
            raise InvalidInputError("Host header", host, "localhost, 127.0.0.1 or the host of public_url")


async def body_of(request: Request, most: int | None = None) -> bytes:
    """Return the whole body, as long as it stays within the limit for all requests and within ``most`` bytes.

    It counts among its tenant's uploads until the request is answered: ask for the tenant first.
    """
    gateway, upload = gateway_of(request), upload_of(request)
    of_tenant = gateway.tenants.limits(upload.tenant_id).max_uploading_bytes_per_tenant
    # Where memory is short, work is refused; heartbeats, polls and deletes have small bodies, and go on.
    is_work = most is None or most > 4 * JSON_BYTES
    unchecked = SMALL_BODY if "content-length" in request.headers else 0

    def grow_to(size: int) -> None:
        if is_work and size - upload.size > unchecked:
            gateway.memory.guard.check(size - upload.size)
        upload.grow_to(size, of_tenant)

    limit = gateway.config.limits.max_request_bytes
    return await read_body(request, limit if most is None else min(limit, most), grow_to)


async def decoded(request: Request, body: bytes, read: Callable[[bytes], T]) -> T:
    """Return ``read(body)``: a small body is read on the event loop, a large or compressed one in a thread.

    The threads are those for reading, of which the tenant of this request has its share.
    """
    if len(body) < SMALL_BODY and "content-encoding" not in request.headers:
        return read(body)
    return await gateway_of(request).reading.in_thread(upload_of(request).tenant_id, partial(read, body))


def json_response(
    content: Mapping[str, object], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(json.dumps(content, allow_nan=False), status, headers, media_type="application/json")


def listing(name: str, items: Sequence[object], offset: int, limit: int, total: int) -> Response:
    """Return one page of a listing, and where it stands among all."""
    return json_response({name: items, "cursor": {"offset": offset, "limit": limit, "total_count": total}})


def public_address(request: Request) -> str:
    """Return where the caller reaches us: as configured, or else as it did just now."""
    return gateway_of(request).config.public_url or str(request.base_url).rstrip("/")


def iso_time(seconds: float) -> str:
    """Return the time with its zone: the SDK compares it with times that have one."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def is_loopback(request: Request) -> bool:
    return request.client is None or request.client.host in ("127.0.0.1", "::1")


def when_to_retry(error: Exception, status: int) -> Mapping[str, str] | None:
    """Return the header for answers that may be better soon. Both SDKs heed it."""
    if isinstance(error, QuotaError | OverloadedError):
        return {"Retry-After": str(error.retry_after)}
    return {"Retry-After": "1"} if status in (429, 503) else None


def status_of(error: TwinkleError) -> int:
    """Return the status that an error is answered with; 500: it is ours."""
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def note_refusal(error: Exception) -> None:
    """Count a request that met a limit in /metrics."""
    if isinstance(error, QuotaError | OverloadedError | BodyTooLargeError):
        note_refusing_limit(error.key)


class RefuseRebinding:
    """ASGI middleware: :func:`refuse_rebinding` for every path but those that are ``for_any_host``."""

    def __init__(self, app: ASGIApp, for_any_host: frozenset[str]) -> None:
        self._app = app
        self._for_any_host = for_any_host
        self._fine: set[bytes] = set()  # headers that were looked at, such as b"localhost:8000"

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
    """Answer errors with a status and a text that has no tracebacks, keys or paths of ours."""

    async def expected(request: Request, error: Exception) -> Response:
        assert isinstance(error, TwinkleError)
        note_refusal(error)
        if isinstance(error, StorageFullError):  # its message names our directories
            logger.error("%s %s: %s", request.method, request.url.path, error)
            return json_response({"detail": "the server's disk is full: nothing was kept, try again later"}, 507)
        status = status_of(error)
        if status == 500:
            return await unexpected(request, error)
        code = {} if error.code is None else {"code": error.code}
        return json_response({"detail": str(error), **code}, status, when_to_retry(error, status))

    async def unexpected(request: Request, error: Exception) -> Response:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        context = current_request()  # the middleware that adds the id to answers is inside of this
        headers = None if context is None else {REQUEST_ID_HEADER: context.http_id}
        return json_response({"detail": "internal error; the server's log has the details"}, 500, headers)

    async def invalid(_request: Request, error: Exception) -> Response:
        """Answer a mistake in the path or the query. Bodies are read by us."""
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        value = repr(first["input"])[:120]
        return json_response({"detail": f"{first['loc'][-1]}: got {value}, {first['msg']}"}, 400)

    async def gone(request: Request, _error: Exception) -> Response:
        """Answer a client that left in the middle of a request: it reads nothing, and it is no error of ours."""
        logger.debug("%s %s: the client is gone", request.method, request.url.path)
        return Response(status_code=400)

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(TwinkleError, expected)
    app.add_exception_handler(Exception, unexpected)
