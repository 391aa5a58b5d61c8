"""The limit on bytes of request bodies that a tenant has in the server at one time.

A body counts from its first byte, or its whole announced length from the start, until its request is answered.
"""

from collections.abc import Callable
from dataclasses import dataclass

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from twinkle.errors import QuotaError
from twinkle.server.types import Tally
from twinkle.server.wire.errors import BodyTooLargeError

_KEY = "twinkle.upload"


@dataclass
class BodyUpload:
    """The body of one request. Until the tenant is known, it counts for the tenant with the empty id."""

    sizes: Tally  # bytes of all uploads under way, by tenant
    tenant_id: str = ""
    size: int = 0  # bytes that are counted for this request

    def belongs_to(self, tenant_id: str) -> None:
        """Set the tenant, before any byte of the body is counted."""
        assert not self.size or tenant_id == self.tenant_id, "ask for the tenant before the body"
        self.tenant_id = tenant_id

    def grow_to(self, size: int, limit: int) -> None:
        """Count the body with ``size`` bytes; QuotaError if all bodies of the tenant would exceed ``limit`` bytes.

        A tenant's only body always fits: its size has a limit of its own.
        """
        used = self.sizes[self.tenant_id]
        if used + size - self.size > limit and used > self.size:
            raise QuotaError("bytes of requests under way", used, limit, "max_uploading_bytes_per_tenant")
        if size > self.size:
            self.sizes[self.tenant_id] += size - self.size
            self.size = size

    def end(self) -> None:
        """Stop counting the body: its request has been answered."""
        self.sizes[self.tenant_id] -= self.size


class UploadCounter:
    """ASGI middleware that counts a body until its request has been answered; only a middleware sees that moment."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._sizes = Tally()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        upload = scope[_KEY] = BodyUpload(self._sizes)
        try:
            await self._app(scope, receive, send)
        finally:
            upload.end()


def upload_of(request: Request) -> BodyUpload:
    """Return the upload that :class:`UploadCounter` attached to a request."""
    upload: BodyUpload = request.scope[_KEY]
    return upload


async def read_body(request: Request, limit: int, grow_to: Callable[[int], None]) -> bytes:
    """Return the whole body of a request; BodyTooLargeError if it has more than ``limit`` bytes.

    ``grow_to`` is called with the size so far and may raise. A size that Content-Length announces counts from the
    start, so that a body that is too large is refused before it is read.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdigit():
        if int(announced) > limit:
            raise BodyTooLargeError(limit)
        grow_to(int(announced))
    parts, size, more = [], 0, True
    while more:  # request.stream() does the same, but is slower: it runs a generator for every piece
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        more = message.get("more_body", False)
        if part := message.get("body", b""):
            size += len(part)
            if size > limit:
                raise BodyTooLargeError(limit)
            grow_to(size)
            parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
