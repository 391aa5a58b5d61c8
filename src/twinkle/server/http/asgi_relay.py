"""HTTP requests as plain values, and an ASGI application that answers them without a socket.

So a request that reached one process is answered in another, by the same application with the same words.
"""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.types import ASGIApp, Message, Receive, Scope

ResultT = TypeVar("ResultT")
Headers = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True)
class HttpRequest:
    """One request. ``path`` is decoded and whole: it begins at the server's root."""

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    client: tuple[str, int] | None

    @classmethod
    def of(cls, scope: Scope, body: bytes) -> "HttpRequest":
        client = scope.get("client")
        return cls(
            method=scope["method"],
            path=scope["path"],
            query=scope["query_string"],
            headers=tuple((bytes(name), bytes(value)) for name, value in scope["headers"]),
            body=body,
            client=None if client is None else (client[0], client[1]),
        )

    def header(self, name: str) -> str | None:
        wanted = name.lower().encode()
        return next((value.decode("latin-1") for key, value in self.headers if key.lower() == wanted), None)


@dataclass(frozen=True)
class HttpHead:
    status: int
    headers: Headers


@dataclass(frozen=True)
class HttpReply:
    head: HttpHead
    body: bytes


_unwatched: set[asyncio.Task[Any]] = set()  # an event loop alone would forget what nobody waits for


async def shielded(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Finish the work also when this is cancelled, because the client that asked for it has left."""
    task = asyncio.create_task(work)
    _unwatched.add(task)
    task.add_done_callback(_unwatched.discard)
    return await asyncio.shield(task)


async def answer(app: ASGIApp, request: HttpRequest) -> HttpReply:
    """Return the whole answer. Cancelling this tells the application that the client has left."""
    async with aclosing(stream(app, request)) as parts:
        head = await anext(parts)
        assert isinstance(head, HttpHead), "the application answers every request"
        return HttpReply(head, b"".join([part async for part in parts if isinstance(part, bytes)]))


async def stream(app: ASGIApp, request: HttpRequest) -> AsyncGenerator[HttpHead | bytes, None]:
    """Yield the head, then the body as it comes."""
    parts: asyncio.Queue[HttpHead | bytes | None] = asyncio.Queue(maxsize=16)
    is_whole = False

    async def send(message: Message) -> None:
        nonlocal is_whole
        if message["type"] == "http.response.start":
            await parts.put(_head(message))
            return
        if message.get("body"):
            await parts.put(message["body"])
        is_whole = not message.get("more_body", False)

    async def run() -> None:
        try:
            await app(_scope(request), replayed(request.body), send)
        except Exception:
            await parts.put(None)
            if not is_whole:  # an error that was answered is raised once more, for servers to log
                raise
        else:
            await parts.put(None)  # not when cancelled: nobody would take it

    running = asyncio.create_task(run())
    try:
        while (part := await parts.get()) is not None:
            yield part
        await running
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


def _scope(request: HttpRequest) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.path,
        "raw_path": request.path.encode(),
        "root_path": "",
        "query_string": request.query,
        "headers": list(request.headers),
        "client": request.client,
        "server": None,
        "state": {},
    }


def replayed(body: bytes, then: Receive | None = None) -> Receive:
    """Return a receive that gives a body which was read before, then what ``then`` does.

    None: nothing more comes. Whoever waits for the client to leave is cancelled when it does.
    """
    is_read = False

    async def receive() -> Message:
        nonlocal is_read
        if is_read and then is not None:
            return await then()
        if is_read:
            await asyncio.Event().wait()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


def _head(message: Message) -> HttpHead:
    return HttpHead(message["status"], tuple((bytes(name), bytes(value)) for name, value in message["headers"]))
