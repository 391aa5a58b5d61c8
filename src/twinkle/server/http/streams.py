"""Answers on their way to a client: whole, in pieces, or as they come; and clients that leave before they are done."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, aclosing, nullcontext, suppress
from dataclasses import dataclass
from typing import TypeVar

from fastapi import Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from twinkle.server.services.futures import Delivery

T = TypeVar("T")
Json = Mapping[str, object]
Bodies = AsyncGenerator[Json, None]
OnError = Callable[[Exception], Json]
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
UNREAD_SECONDS = 60.0  # a client that takes nothing for so long is gone; what it asked for is not kept for ever
_PART = 2**18  # bytes; the server's buffer for a connection holds less
_SMALL = 2**16  # what is no larger is sent in one piece, and is fetched once it is in the buffer


@dataclass(frozen=True)
class Framing:
    """What is written around each body, and after the last one."""

    media_type: str
    before: str
    after: str
    last: str


EVENTS = Framing("text/event-stream", "data: ", "\n\n", "data: [DONE]\n\n")
LINES = Framing("application/x-ndjson", "", "\n", "")


async def begun(request: Request, bodies: Bodies, framing: Framing, failed: OnError) -> Response:
    """Wait for the first body, then return the stream. So what is refused at once is refused by its status code."""
    first = await unless_gone(request.receive, anext(bodies))
    return json_stream(to_the_end(first, bodies, failed), framing)


def json_stream(bodies: Bodies, framing: Framing) -> Response:
    """Return what sends each body as it comes. A client that leaves, or does not read, ends ``bodies`` at once."""
    stream = StreamedResult(_framed(bodies, framing), framing.media_type, undelivered())
    stream.headers.update(_HEADERS)
    return stream


async def _framed(bodies: Bodies, framing: Framing) -> AsyncGenerator[bytes, None]:
    async with aclosing(bodies):
        async for body in bodies:
            yield f"{framing.before}{json.dumps(body, allow_nan=False)}{framing.after}".encode()
    yield framing.last.encode()


async def to_the_end(first: Json, bodies: Bodies, failed: OnError) -> Bodies:
    """Yield all bodies. An error on the way becomes a body, and the last one."""
    async with aclosing(bodies):
        yield first
        try:
            async for body in bodies:
                yield body
        except Exception as error:  # noqa: BLE001 - the answer has begun: this is the edge
            yield failed(error)


async def _send_part(send: Send, part: bytes) -> None:
    """Send a part. The server waits in here while the client reads more slowly than we write: TimeoutError."""
    async with asyncio.timeout(UNREAD_SECONDS):
        await send({"type": "http.response.body", "body": part, "more_body": True})


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of ``work``. If the client leaves first, it is cancelled and ClientDisconnect raised."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if leaving.done():  # also of both at once: nobody is there to read the result
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def left(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


# --- results, which are noted once the client has them ----------------------------------------------------------------
#
# A server that hands a whole body to the socket's buffer has sent nothing yet: the client may hang up before it reads a
# byte, and the result would count as fetched. So large ones go in pieces, as fast as the client reads.

Delivering = AbstractContextManager[Delivery]


def undelivered() -> Delivering:
    """Return what notes no delivery: of an answer that is not the result itself, or that nobody counts."""
    return nullcontext(Delivery())


class StreamedResult(Response):
    """A body that is sent as fast as the client reads. ``size`` of it, None where it is made while it is sent.

    ``delivering`` is entered when sending begins and told whether it was completed.
    """

    def __init__(
        self, parts: AsyncGenerator[bytes, None], media_type: str, delivering: Delivering, size: int | None = None
    ) -> None:
        super().__init__(None, media_type=media_type)
        del self.headers["content-length"]
        if size is not None:
            self.headers["content-length"] = str(size)
        self._parts = parts
        self._delivering = delivering

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._delivering as delivery, suppress(ClientDisconnect, TimeoutError):
            # A client that has left is written to without a word: so it is looked for meanwhile.
            await unless_gone(receive, self._send(send))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            delivery.complete = True

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._parts) as parts:
            async for part in parts:
                await _send_part(send, part)
                await asyncio.sleep(0)  # many that are ready at once must not keep the event loop from others
        await _send_part(send, b"")  # sending nothing waits for the buffer
        await asyncio.sleep(0)


class SentResult(Response):
    """A whole body, which is small enough for the buffer: it is sent in one piece."""

    def __init__(self, body: bytes, media_type: str, delivering: Delivering) -> None:
        super().__init__(body, media_type=media_type)
        self._delivering = delivering

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._delivering as delivery:
            await super().__call__(scope, receive, send)
            delivery.complete = True


def sent_result(body: bytes, media_type: str, delivering: Delivering) -> Response:
    """Return what sends a whole body: at once if it is small, otherwise in pieces."""
    if len(body) <= _SMALL:
        return SentResult(body, media_type, delivering)
    return StreamedResult(_parts_of(body), media_type, delivering, len(body))


async def _parts_of(body: bytes) -> AsyncGenerator[bytes, None]:
    view = memoryview(body)
    for place in range(0, len(body), _PART):
        yield bytes(view[place : place + _PART])
