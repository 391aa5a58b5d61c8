"""HTTP requests as plain values, and calling an ASGI application with them without a socket.

This lets another process answer a request than the one that received it, with the same application.
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
    """One HTTP request. ``path`` is percent-decoded and absolute: it begins at the server's root."""

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    client: tuple[str, int] | None

    @classmethod
    def from_scope(cls, scope: Scope, body: bytes) -> "HttpRequest":
        """Return the request of an ASGI scope, with its whole body."""
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
    """The status and headers of an answer."""

    status: int
    headers: Headers


@dataclass(frozen=True)
class HttpReply:
    """A whole answer: its head and its body."""

    head: HttpHead
    body: bytes


_unwatched: set[asyncio.Task[Any]] = set()  # event loops hold tasks weakly: these would be garbage collected


async def shielded(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run ``work`` to its end, even if this call is cancelled because the client has disconnected."""
    task = asyncio.create_task(work)
    _unwatched.add(task)
    task.add_done_callback(_unwatched.discard)
    return await asyncio.shield(task)


async def answer(app: ASGIApp, request: HttpRequest) -> HttpReply:
    """Return the application's whole answer. Cancelling this call cancels the application's work on the request."""
    async with aclosing(stream(app, request)) as parts:
        head = await anext(parts)
        assert isinstance(head, HttpHead), "the application answers every request"
        return HttpReply(head, b"".join([part async for part in parts if isinstance(part, bytes)]))


async def stream(app: ASGIApp, request: HttpRequest) -> AsyncGenerator[HttpHead | bytes, None]:
    """Yield the head of the answer, then the parts of its body as the application produces them."""
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
            if not is_whole:  # Starlette raises an error again after answering it, for servers to log: that one is done
                raise
        else:
            await parts.put(None)  # not when cancelled: then nobody reads the queue

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
    """Return an ASGI ``receive`` that returns a body which was read before, and then calls ``then``.

    ``then`` None: after the body it blocks for ever. A task that waits there for the client to disconnect is
    cancelled instead.
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
