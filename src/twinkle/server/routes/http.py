"""What all handlers share: the gateway, the caller, the body, JSON answers, and how errors become status codes."""

import json
import logging
from collections.abc import Mapping
from typing import TypeVar

from fastapi import FastAPI, Request, Response

from twinkle.errors import (
    GoneError,
    NotFoundError,
    QuotaError,
    TwinkleError,
    UnauthorizedError,
    UserError,
)
from twinkle.server.gateway import Gateway
from twinkle.server.state import StorageFullError
from twinkle.server.wire import fields
from twinkle.server.wire.errors import BodyTooLargeError

logger = logging.getLogger(__name__)

_BEARER = "bearer "
RequestT = TypeVar("RequestT", bound=fields.Request)

# The first that matches; anything else of ours is a 500.
_STATUS: tuple[tuple[type[TwinkleError], int], ...] = (
    (UnauthorizedError, 401),
    (NotFoundError, 404),
    (GoneError, 410),
    (BodyTooLargeError, 413),
    (QuotaError, 429),
    (UserError, 400),
    (StorageFullError, 507),
)


def gateway_of(request: Request) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway


async def tenant_of(request: Request) -> str:
    """Who asks. The SDK sends X-API-Key; the others are for people and for our own client."""
    key = request.headers.get("x-api-key")
    for name in ("twinkle-authorization", "authorization"):
        value = request.headers.get(name)
        if key is None and value is not None:
            key = value[len(_BEARER) :].strip() if value.lower().startswith(_BEARER) else value
    return await gateway_of(request).tenant(key)


async def body_of(request: Request) -> bytes:
    """The whole body, as long as it stays within the limit."""
    limit = gateway_of(request).config.limits.max_request_bytes
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limit:
        raise BodyTooLargeError(limit)
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise BodyTooLargeError(limit)
        parts.append(part)
    return b"".join(parts)


async def parsed(request_type: type[RequestT], request: Request) -> RequestT:
    return fields.parse(request_type, await body_of(request))


def json_response(content: Mapping[str, object], status: int = 200) -> Response:
    return Response(json.dumps(content, allow_nan=False), status, media_type="application/json")


def is_loopback(request: Request) -> bool:
    return request.client is None or request.client.host in ("127.0.0.1", "::1")


def install_error_handlers(app: FastAPI) -> None:
    """No tracebacks, keys or paths of ours to clients."""

    async def expected(_request: Request, error: Exception) -> Response:
        assert isinstance(error, TwinkleError)
        for kind, status in _STATUS:
            if isinstance(error, kind):
                return json_response({"detail": str(error)}, status)
        return await unexpected(_request, error)

    async def unexpected(request: Request, error: Exception) -> Response:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return json_response({"detail": "internal error; the server's log has the details"}, 500)

    app.add_exception_handler(TwinkleError, expected)
    app.add_exception_handler(Exception, unexpected)
