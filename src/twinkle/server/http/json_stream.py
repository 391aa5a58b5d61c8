"""JSON bodies sent one by one, as server-sent events or as lines, and clients that leave before they are done."""

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import TypeVar

from fastapi import Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
UNREAD_SECONDS = 60.0  # a client that takes nothing for so long is gone; what it asked for is not kept for ever


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
    """Sends each body as it comes. A client that leaves ends ``bodies`` at once.

    So does one that stays and does not read.
    """

    def __init__(self, bodies: AsyncGenerator[Mapping[str, object], None], framing: Framing) -> None:
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


async def _send_part(send: Send, text: str, *, more: bool = True) -> None:
    async with asyncio.timeout(UNREAD_SECONDS):
        await send({"type": "http.response.body", "body": text.encode(), "more_body": more})


async def unless_gone(receive: Receive, work: Coroutine[object, object, T]) -> T:
    """``work``'s result; if the client leaves first, the work is cancelled and ClientDisconnect raised."""
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
