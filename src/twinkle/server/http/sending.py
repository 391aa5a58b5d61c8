"""Results on their way to a client: large ones in pieces, as fast as the client reads, and noted once it has them.

A server that hands a whole body to the socket's buffer has sent nothing yet: the client may hang up before it reads a
byte, and the result would count as fetched.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, nullcontext, suppress

from fastapi import Response
from starlette.types import Receive, Scope, Send

from twinkle.server.http.json_stream import UNREAD_SECONDS, left
from twinkle.server.services.futures import Delivery

__all__ = ["Delivering", "SentResult", "StreamedResult", "undelivered"]

_PART = 2**18  # bytes; the server's buffer for a connection holds less
_SMALL = 2**16  # what is no larger is sent in one piece, and is fetched once it is in the buffer

Delivering = AbstractContextManager[Delivery]


def undelivered() -> Delivering:
    """Return what notes no delivery: of an answer that is not the result itself, or that nobody counts."""
    return nullcontext(Delivery())


class SentResult(Response):
    """A whole body. ``delivering`` is entered when sending begins and told whether it was completed."""

    def __init__(self, body: bytes, media_type: str, delivering: Delivering) -> None:
        super().__init__(None, media_type=media_type)
        self.headers["content-length"] = str(len(body))
        self._result = body
        self._delivering = delivering

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        with self._delivering as delivery:
            if len(self._result) > _SMALL:
                delivery.complete = await _send_parts(start, _parts_of(self._result), receive, send)
                return
            await send(start)
            await send({"type": "http.response.body", "body": self._result, "more_body": False})
            delivery.complete = True


class StreamedResult(Response):
    """A body that is made while it is sent, so that its length is not known."""

    def __init__(self, parts: AsyncIterator[bytes], media_type: str, delivering: Delivering) -> None:
        self.status_code = 200
        self.background = None
        self.media_type = media_type
        self.body = b""
        self._parts = parts
        self._delivering = delivering
        self.init_headers({})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        with self._delivering as delivery:
            delivery.complete = await _send_parts(start, self._parts, receive, send)


async def _parts_of(body: bytes) -> AsyncIterator[bytes]:
    view = memoryview(body)
    for place in range(0, len(body), _PART):
        yield bytes(view[place : place + _PART])


async def _send_parts(start: dict[str, object], parts: AsyncIterator[bytes], receive: Receive, send: Send) -> bool:
    """Return whether the client stayed to the end. Whoever reads nothing for a minute is gone, too."""
    leaving = asyncio.ensure_future(left(receive))
    try:
        await send(start)
        async for part in parts:
            # The server waits in here while the client reads more slowly than we write; a client that has left is
            # written to without a word.
            async with asyncio.timeout(UNREAD_SECONDS):
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0)
            if leaving.done():
                return False
        async with asyncio.timeout(UNREAD_SECONDS):
            await send({"type": "http.response.body", "body": b"", "more_body": True})  # waits for the buffer
        await asyncio.sleep(0)
        if leaving.done():
            return False
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return True
    except TimeoutError:
        return False
    finally:
        leaving.cancel()
        with suppress(asyncio.CancelledError):
            await leaving
