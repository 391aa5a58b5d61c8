"""Answers on their way to a client: whole, in pieces, or as they come; and clients that leave before they are done."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping
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


class JsonStream(Response):
    """Sends each body as it comes. A client that leaves ends ``bodies`` at once, and so does one that does not read."""

    def __init__(self, bodies: Bodies, framing: Framing) -> None:
        self.status_code = 200
        self.background = None
        self.media_type = framing.media_type
        self._bodies = bodies
        self._framing = framing
        self.init_headers(_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnect, TimeoutError):  # nobody is left who could be told
            await unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        framing = self._framing
        async with aclosing(self._bodies) as bodies:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for body in bodies:
                await _send_part(send, f"{framing.before}{json.dumps(body, allow_nan=False)}{framing.after}")
                await asyncio.sleep(0)  # many that are ready at once must not keep the event loop from others
        await _send_part(send, framing.last, more=False)


async def begun(request: Request, bodies: Bodies, framing: Framing, failed: OnError) -> JsonStream:
    """Wait for the first body, then return the stream. So what is refused at once is refused by its status code."""
    first = await unless_gone(request.receive, _next(bodies))
    return JsonStream(to_the_end(first, bodies, failed), framing)


async def to_the_end(first: Json, bodies: Bodies, failed: OnError) -> Bodies:
    """Yield all bodies. An error on the way becomes a body, and the last one."""
    async with aclosing(bodies):
        yield first
        try:
            async for body in bodies:
                yield body
        except Exception as error:  # noqa: BLE001 - the answer has begun: this is the edge
            yield failed(error)


async def _next(bodies: Bodies) -> Json:
    return await anext(bodies)


async def _send_part(send: Send, text: str, *, more: bool = True) -> None:
    async with asyncio.timeout(UNREAD_SECONDS):
        await send({"type": "http.response.body", "body": text.encode(), "more_body": more})


async def unless_gone(receive: Receive, work: Coroutine[object, object, T]) -> T:
    """Return the result of ``work``. If the client leaves first, it is cancelled and ClientDisconnect raised."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
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
        super().__init__(None, media_type=media_type)
        del self.headers["content-length"]
        self._parts = parts
        self._delivering = delivering

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        with self._delivering as delivery:
            delivery.complete = await _send_parts(start, self._parts, receive, send)


async def _parts_of(body: bytes) -> AsyncIterator[bytes]:
    view = memoryview(body)
    for place in range(0, len(body), _PART):
        yield bytes(view[place : place + _PART])


async def _send_parts(start: dict[str, object], parts: AsyncIterator[bytes], receive: Receive, send: Send) -> bool:
    """Return whether the client stayed to the end. One that reads nothing for a minute is gone, too."""
    leaving = asyncio.ensure_future(left(receive))

    async def stays_for(part: bytes) -> bool:
        # The server waits in here while the client reads more slowly than we write; a client that has left is written
        # to without a word.
        async with asyncio.timeout(UNREAD_SECONDS):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await asyncio.sleep(0)
        return not leaving.done()

    try:
        await send(start)
        async for part in parts:
            if not await stays_for(part):
                return False
        if not await stays_for(b""):  # sending nothing waits for the buffer
            return False
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return True
    except TimeoutError:
        return False
    finally:
        leaving.cancel()
        with suppress(asyncio.CancelledError):
            await leaving
