"""Server-sent events, and clients that leave before they are done."""

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from typing import TypeVar

from fastapi import Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from twinkle.server.openai.bodies import Json

T = TypeVar("T")
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_UNREAD_SECONDS = 60.0  # a client that takes nothing for so long is gone; what it asked for is not kept for ever


class EventStream(Response):
    """Sends each body as an event, and at last ``[DONE]``. A client that leaves ends ``bodies`` at once.

    So does one that stays and does not read.
    """

    media_type = "text/event-stream"

    def __init__(self, bodies: AsyncGenerator[Json, None]) -> None:
        self.status_code = 200
        self.background = None
        self._bodies = bodies
        self.init_headers(_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnect, TimeoutError):  # nobody is left who could be told
            await unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        async with aclosing(self._bodies) as bodies:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for body in bodies:
                await _send_event(send, json.dumps(body, allow_nan=False))
                await asyncio.sleep(0)  # many that are ready at once must not keep the event loop from others
        await _send_event(send, "[DONE]")
        await send({"type": "http.response.body", "body": b""})


async def _send_event(send: Send, data: str) -> None:
    async with asyncio.timeout(_UNREAD_SECONDS):
        await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})


async def unless_gone(receive: Receive, work: Coroutine[object, object, T]) -> T:
    """``work``'s result; if the client leaves first, the work is cancelled and ClientDisconnect raised."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
