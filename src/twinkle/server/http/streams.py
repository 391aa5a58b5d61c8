"""Sending answers: whole, in pieces, or as a stream; and noticing clients that disconnect before the end."""

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
Comment = Callable[[], str]  # returns one line for people, such as why a request is queued
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
UNREAD_SECONDS = 60.0  # a client that reads nothing for this long counts as gone, and its answer is dropped
_QUIET_SECONDS = 5.0  # a client that waits longer than this for the first body is told why, and again after this time
_PART = 2**18  # bytes of one part; more than the server's write buffer of a connection, so that sending waits for it
_SMALL = 2**16  # bytes; a result up to this size is sent in one piece, and counts as delivered once it is in the buffer


@dataclass(frozen=True)
class Framing:
    """The text that is written before and after each JSON body of a stream, and after the last one.

    ``named``: before each body, a line ``event:`` has the value of its field ``type``.
    """

    media_type: str
    before: str
    after: str
    last: str
    named: bool = False


EVENTS = Framing("text/event-stream", "data: ", "\n\n", "data: [DONE]\n\n")
NAMED_EVENTS = Framing("text/event-stream", "data: ", "\n\n", "", named=True)
LINES = Framing("application/x-ndjson", "", "\n", "")


async def begun(request: Request, bodies: Bodies, framing: Framing, failed: OnError) -> Response:
    """Wait for the first body, then return the stream.

    An error before the first body is raised, so that it is still answered with its status code. ``failed``: turns a
    later error into the last body of the stream.
    """
    first = await unless_gone(request.receive, anext(bodies))
    return json_stream(until_failure(first, bodies, failed), framing)


async def begun_or_commented(
    request: Request, bodies: Bodies, framing: Framing, failed: OnError, comment: Comment
) -> Response:
    """Do the same as :func:`begun` for server-sent events, but wait no longer than five seconds.

    After that the stream begins without a body. Until the first body is there, the client gets the text of ``comment``
    every five seconds as a comment, which readers of such streams ignore. From then on all errors are bodies.
    """
    first = asyncio.ensure_future(anext(bodies))
    try:
        await unless_gone(request.receive, asyncio.wait({first}, timeout=_QUIET_SECONDS))
    except ClientDisconnect:
        await _cancelled(first)
        raise
    if first.done():
        return json_stream(until_failure(first.result(), bodies, failed), framing)
    return _stream(_commented(first, bodies, framing, failed, comment), framing)


def json_stream(bodies: Bodies, framing: Framing) -> Response:
    """Return a response that sends each body as it comes.

    The generator ``bodies`` is closed when the client disconnects, or has read nothing for a minute.
    """
    return _stream(_framed(bodies, framing), framing)


def _stream(parts: AsyncGenerator[bytes, None], framing: Framing) -> Response:
    stream = StreamedResult(parts, framing.media_type, undelivered())
    stream.headers.update(_HEADERS)
    return stream


async def _commented(
    first: asyncio.Future[Json], bodies: Bodies, framing: Framing, failed: OnError, comment: Comment
) -> AsyncGenerator[bytes, None]:
    try:
        while not first.done():
            yield f": {comment()}\n\n".encode()
            await asyncio.wait({first}, timeout=_QUIET_SECONDS)
        async for part in _framed(_from_first(first, bodies, failed), framing):
            yield part
    finally:  # the client may have disconnected
        await _cancelled(first)
        await bodies.aclose()


async def _from_first(first: asyncio.Future[Json], bodies: Bodies, failed: OnError) -> Bodies:
    try:
        body = first.result()
    except Exception as error:  # noqa: BLE001 - the answer has begun: this is the edge
        yield failed(error)
        return
    async with aclosing(until_failure(body, bodies, failed)) as all_bodies:
        async for each in all_bodies:
            yield each


async def _cancelled(task: asyncio.Future[Json]) -> None:
    """Cancel a task, unless it is done, and wait for its end."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _framed(bodies: Bodies, framing: Framing) -> AsyncGenerator[bytes, None]:
    async with aclosing(bodies):
        async for body in bodies:
            name = f"event: {body['type']}\n" if framing.named else ""
            yield f"{name}{framing.before}{json.dumps(body, allow_nan=False)}{framing.after}".encode()
    yield framing.last.encode()


async def until_failure(first: Json, bodies: Bodies, failed: OnError) -> Bodies:
    """Yield all bodies. An error on the way is turned into one more body, which is the last."""
    async with aclosing(bodies):
        yield first
        try:
            async for body in bodies:
                yield body
        except Exception as error:  # noqa: BLE001 - the answer has begun: this is the edge
            yield failed(error)


async def _send_part(send: Send, part: bytes) -> None:
    """Send a part of a body. ``send`` waits while the client reads slowly; TimeoutError if that takes a minute."""
    async with asyncio.timeout(UNREAD_SECONDS):
        await send({"type": "http.response.body", "body": part, "more_body": True})


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of ``work``. If the client disconnects first, cancel it and raise ClientDisconnect."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if leaving.done():  # even if the work is done, too: nobody is there to read the result
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def left(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


# --- results, whose delivery is noted ---------------------------------------------------------------------------------
#
# A body that is in the server's write buffer has not reached the client: the client may disconnect before it reads a
# byte, and the result would wrongly count as delivered. Therefore large results are sent in parts, as fast as the
# client reads them.

Delivering = AbstractContextManager[Delivery]


def undelivered() -> Delivering:
    """Return a context that notes no delivery, for answers that are not results or whose delivery does not matter."""
    return nullcontext(Delivery())


class StreamedResult(Response):
    """A response whose body is sent in parts, as fast as the client reads them.

    ``size``: the bytes of the body; None if it is produced while it is sent. ``delivering``: a context that is entered
    when sending begins; its delivery is marked as complete once everything is sent.
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
            # Writing to a client that has disconnected raises no error, so the disconnect is watched for meanwhile.
            await unless_gone(receive, self._send(send))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            delivery.complete = True

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._parts) as parts:
            async for part in parts:
                await _send_part(send, part)
                await asyncio.sleep(0)  # many parts that are ready at once must not block the event loop
        await _send_part(send, b"")  # an empty part sends nothing, but waits until the buffer has drained
        await asyncio.sleep(0)


class SentResult(Response):
    """A response whose body is small enough for the write buffer, and is sent in one piece."""

    def __init__(self, body: bytes, media_type: str, delivering: Delivering) -> None:
        super().__init__(body, media_type=media_type)
        self._delivering = delivering

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._delivering as delivery:
            await super().__call__(scope, receive, send)
            delivery.complete = True


def sent_result(body: bytes, media_type: str, delivering: Delivering) -> Response:
    """Return a response with a whole body, which is sent in one piece up to 64 KiB, otherwise in parts."""
    if len(body) <= _SMALL:
        return SentResult(body, media_type, delivering)
    return StreamedResult(_parts_of(body), media_type, delivering, len(body))


async def _parts_of(body: bytes) -> AsyncGenerator[bytes, None]:
    view = memoryview(body)
    for place in range(0, len(body), _PART):
        yield bytes(view[place : place + _PART])
