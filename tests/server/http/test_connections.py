"""Connections and headers are limited before any key is checked: uvicorn with our protocol and a tiny application."""

import asyncio
import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import pytest
import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send

from twinkle.server.http.connections import (
    BoundedProtocol,
    ConnectionLimits,
    Connections,
    connections_within_open_files,
)

_HOST = b"Host: 127.0.0.1\r\n"
_QUICK = ConnectionLimits(head_seconds=0.2, progress_seconds=0.3, check_seconds=0.05)


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the number of headers and bytes read; /large sends a large answer, /wait never answers."""
    size = 0
    while scope["path"] not in ("/large", "/unread"):
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size += len(message["body"])
        if not message["more_body"]:
            break
    if scope["path"] == "/wait":
        while (await receive())["type"] != "http.disconnect":
            pass
        return
    body = b"x" * 2**26 if scope["path"] == "/large" else f"{len(scope['headers'])} {size}".encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Edge:
    """A running server."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.refusals: list[str] = []
        self.connections = Connections(limits, self.refusals.append)
        self.listener = socket.create_server(("127.0.0.1", 0))
        settings = uvicorn.Config(
            application,
            http=cast("type[asyncio.Protocol]", partial(BoundedProtocol, self.connections)),
            ws="none",
            lifespan="off",
            log_config=None,
            timeout_keep_alive=1,
        )
        self.server = uvicorn.Server(settings)
        self.server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self.server.serve(sockets=[self.listener]))

    def connect(self) -> socket.socket:
        return socket.create_connection(self.listener.getsockname()[:2], timeout=30)

    def close(self) -> None:
        self.server.should_exit = self.server.force_exit = True
        self.thread.join()
        self.listener.close()


@pytest.fixture
def edge() -> Iterator[Callable[..., Edge]]:
    edges: list[Edge] = []

    def make(**limits: Any) -> Edge:
        edges.append(Edge(ConnectionLimits(**{**vars(_QUICK), "head_seconds": 30, **limits})))
        return edges[-1]

    yield make
    for one in edges:
        one.close()


def answer(connection: socket.socket, *parts: bytes) -> bytes:
    """Send the parts and return what arrives before the server closes; it may close before it has read everything."""
    with contextlib.suppress(OSError):
        for part in parts:
            connection.sendall(part)
    return rest(connection)


def rest(connection: socket.socket) -> bytes:
    received = []
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(65536):
            received.append(piece)
    return b"".join(received)


def get(path: str = "/", *headers: bytes) -> bytes:
    return f"GET {path} HTTP/1.1\r\n".encode() + _HOST + b"".join(headers) + b"\r\n"


def chunked(*rest: bytes) -> bytes:
    return b"POST / HTTP/1.1\r\n" + _HOST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + b"".join(rest)


CLOSE = b"Connection: close\r\n"


def test_ordinary_requests_are_served(edge: Callable[..., Edge]) -> None:
    with edge().connect() as connection:
        connection.sendall(get())
        assert connection.recv(4096).endswith(b"1 0")
        long = b"X: " + b"x" * 60_000 + b"\r\n"
        assert answer(connection, get("/" + "p" * 2000, CLOSE, long)).endswith(b"3 0")


def test_a_large_body_is_no_header(edge: Callable[..., Edge]) -> None:
    body = b"x" * 1_000_000
    head = b"POST / HTTP/1.1\r\n" + _HOST + CLOSE + f"Content-Length: {len(body)}\r\n\r\n".encode()
    with edge().connect() as connection:
        assert answer(connection, head + body).endswith(b"3 1000000")
    with edge().connect() as connection:
        pieces = b"".join(b"10000\r\n" + b"x" * 65_536 + b"\r\n" for _ in range(10))
        assert answer(connection, chunked(pieces, b"0\r\n\r\n")).endswith(b"3 655360")


@pytest.mark.parametrize(
    ("status", "head"),
    [
        (431, get("/", b"X: " + b"x" * 70_000 + b"\r\n")),
        (431, get("/", *(b"X: y\r\n" for _ in range(300)))),
        (431, get("/", *(f"X{n}: ".encode() + b"y" * 1000 + b"\r\n" for n in range(100)))),
        (414, get("/" + "x" * 20_000)),
        (431, b"\r\n" * 500_000),
    ],
    ids=["one long header", "many headers", "many bytes of headers", "long URL", "nothing"],
)
def test_a_head_beyond_the_limits_is_refused(edge: Callable[..., Edge], status: int, head: bytes) -> None:
    running = edge()
    with running.connect() as connection:
        assert answer(connection, head).startswith(f"HTTP/1.1 {status} ".encode())
    assert running.refusals == ["max_header_bytes"]


@pytest.mark.parametrize("beginning", [b"GET / HTTP/1.1\r\nX: ", b"GET /", chunked(b"1\r\nx\r\n0\r\nX: ")])
def test_what_never_ends_is_not_collected(edge: Callable[..., Edge], beginning: bytes) -> None:
    running = edge()
    sent = 0
    with running.connect() as connection, contextlib.suppress(ConnectionError):
        connection.sendall(beginning)
        for _ in range(1000):
            connection.sendall(b"x" * 65_536)
            sent += 65_536
    assert sent < 30_000_000, "what the kernel's buffers take is all that can be sent"
    assert running.refusals[:1] == ["max_header_bytes"]


def test_trailers_are_dropped_and_bounded(edge: Callable[..., Edge]) -> None:
    with edge().connect() as connection:
        assert answer(connection, chunked(b"1\r\nx\r\n0\r\nX-API-Key: late\r\n\r\n")).endswith(b"3 1")
    running = edge()
    with running.connect() as connection:
        answer(connection, chunked(b"1\r\nx\r\n0\r\n", *(b"X: y\r\n" for _ in range(300))))
    assert running.refusals == ["max_header_bytes"]


def test_pipelined_requests_are_bounded(edge: Callable[..., Edge]) -> None:
    with edge().connect() as connection:
        assert answer(connection, get() * 3 + get("/", CLOSE)).count(b"HTTP/1.1 200") == 4
    running = edge()
    with running.connect() as connection:
        assert answer(connection, get("/wait") + get() * 1000) == b""
    assert running.refusals == ["pipelined_requests"]


@pytest.mark.parametrize(
    ("beginning", "said"),
    [(b"", b""), (b"GET / HT", b"HTTP/1.1 408"), (get()[:-2] + b"Content-Length: 10\r\n\r\nhalf", b"")],
    ids=["silent", "half a head", "half a body"],
)
def test_a_silent_connection_is_closed(edge: Callable[..., Edge], beginning: bytes, said: bytes) -> None:
    running = edge(head_seconds=0.2)
    with running.connect() as connection:
        assert answer(connection, beginning).startswith(said)
    assert running.refusals == ["silent_connections"]


def test_a_head_that_grows_by_a_byte_at_a_time_is_closed_too(edge: Callable[..., Edge]) -> None:
    running = edge(head_seconds=0.2)
    with running.connect() as connection, contextlib.suppress(ConnectionError):
        connection.settimeout(0.05)
        connection.sendall(b"GET / HTTP/1.1\r\n")
        for byte in itertools.cycle((b"X", b": ", b"y", b"\r\n")):
            connection.sendall(byte)
            with contextlib.suppress(TimeoutError):
                if connection.recv(4096).startswith(b"HTTP/1.1 4"):
                    break
    assert running.refusals == ["silent_connections"]


def test_a_connection_that_is_refused_in_the_middle_of_its_body_does_not_stay(edge: Callable[..., Edge]) -> None:
    """uvicorn's keep-alive timer stops at the next byte, and the request never ends."""
    running = edge()
    with running.connect() as connection:
        head = b"POST /unread HTTP/1.1\r\n" + _HOST + b"Content-Length: 1000000\r\n\r\n"
        connection.sendall(head)
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        answer(connection, b"x")
    assert running.refusals == ["silent_connections"]


def test_a_request_that_is_being_answered_may_take_long(edge: Callable[..., Edge]) -> None:
    running = edge(head_seconds=0.1, progress_seconds=0.1, check_seconds=0.02)
    with running.connect() as connection:
        connection.sendall(get("/wait"))
        connection.settimeout(1)
        with pytest.raises(TimeoutError):
            connection.recv(1)
    assert running.refusals == []


def test_an_answer_that_nobody_reads_is_dropped(edge: Callable[..., Edge]) -> None:
    running = edge()
    with running.connect() as connection:
        connection.sendall(get("/large"))
        for _ in range(300):
            if running.refusals:
                break
            threading.Event().wait(0.1)
        assert running.refusals == ["unread_answers"]
        assert len(rest(connection)) < 2**26


def test_connections_from_one_address_are_bounded(edge: Callable[..., Edge]) -> None:
    running = edge(per_address=3)
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(running.connect()).sendall(get("/wait"))
        refused = rest(stack.enter_context(running.connect()))
        assert refused.startswith(b"HTTP/1.1 429")
        assert b"limits.max_connections_per_address" in refused
    assert running.refusals == ["max_connections_per_address"]


def test_places_come_back(edge: Callable[..., Edge]) -> None:
    running = edge(per_address=2, total=2)
    for _ in range(10):
        with running.connect() as connection:
            assert answer(connection, get("/", CLOSE)).startswith(b"HTTP/1.1 200")
    assert running.refusals == []


def test_who_waits_longest_makes_room(edge: Callable[..., Edge], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinkle.server.http.connections._SETTLED_SECONDS", 0.0)
    running = edge(total=3)
    with running.connect() as busy, running.connect() as silent, running.connect() as newer:
        busy.sendall(get("/wait"))
        newer.sendall(get())
        assert newer.recv(4096).endswith(b"1 0")
        with running.connect() as another:
            assert answer(another, get("/", CLOSE)).endswith(b"2 0")
        assert rest(silent) == b""
        assert answer(newer, get("/", CLOSE)).endswith(b"2 0")
    assert running.refusals == ["open_files"]


def test_without_room_a_connection_is_refused(edge: Callable[..., Edge]) -> None:
    running = edge(total=2)
    with running.connect() as first, running.connect() as second:
        first.sendall(get("/wait"))
        second.sendall(get("/wait"))
        with running.connect() as third:
            assert rest(third).startswith(b"HTTP/1.1 503")
    assert running.refusals == ["open_files"]


def test_files_are_kept_for_the_server_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinkle.server.http.connections._open_files", lambda: 50)
    for files, total, backlog in ((400, 200, 50), (1024, 590, 128), (65_536, 60_878, 4096)):
        monkeypatch.setattr("resource.getrlimit", lambda _, files=files: (files, files))
        limits = connections_within_open_files(7, 9000)
        assert (limits.total, limits.backlog, limits.per_address, limits.header_bytes) == (total, backlog, 7, 9000)


def test_an_ipv6_network_is_one_address() -> None:
    limits = ConnectionLimits(per_address=1)
    from twinkle.server.http.connections import _network

    assert limits.per_address == 1
    assert _network("2001:db8::1") == _network("2001:db8::ffff:2") != _network("2001:db8:1::1")
    assert _network("::ffff:10.0.0.1") == _network("10.0.0.1")
