"""Request bodies on their way in: how much of a tenant's there is at one time, from its first byte to the answer."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from twinkle.errors import QuotaError
from twinkle.server.wire.errors import BodyTooLargeError

__all__ = ["Upload", "UploadCounter", "read_body", "upload_of"]

_KEY = "twinkle.upload"


@dataclass
class Upload:
    """The body of one request. Until its tenant is known it counts for the tenant without a name."""

    sizes: Counter[str]  # of all uploads, by tenant
    tenant_id: str = ""
    size: int = 0

    def belongs_to(self, tenant_id: str) -> None:
        assert not self.size or tenant_id == self.tenant_id, "ask for the tenant before the body"
        self.tenant_id = tenant_id

    def grow_to(self, size: int, limit: int) -> None:
        """``limit``: of all bodies of the tenant together; QuotaError if this one does not fit."""
        used = self.sizes[self.tenant_id]
        if used + size - self.size > limit and used > self.size:
            raise QuotaError("bytes of requests under way", used, limit, "max_uploading_bytes_per_tenant")
        if size > self.size:
            self.sizes[self.tenant_id] += size - self.size
            self.size = size

    def end(self) -> None:
        self.sizes[self.tenant_id] -= self.size
        if not self.sizes[self.tenant_id]:
            del self.sizes[self.tenant_id]


class UploadCounter:
    """ASGI middleware that counts a body until its request has been answered, which only a middleware knows."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._sizes: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        upload = scope[_KEY] = Upload(self._sizes)
        try:
            await self._app(scope, receive, send)
        finally:
            upload.end()


def upload_of(request: Request) -> Upload:
    upload: Upload = request.scope[_KEY]
    return upload


async def read_body(request: Request, limit: int, grow_to: Callable[[int], None]) -> bytes:
    """Return the whole body. ``grow_to`` is told its size so far, and may raise. BodyTooLargeError above the limit.

    A size that is announced counts from the start: what is too large is refused before it is sent.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdigit():
        if int(announced) > limit:
            raise BodyTooLargeError(limit)
        grow_to(int(announced))
    parts, size, more = [], 0, True
    while more:  # request.stream() does the same, with a generator and a flag for every piece
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
