"""Attacks without a key: endless headers, one endless header, an endless URL, and silent connections."""

import contextlib
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.robustness.attack.confined import ConfinedServer
from tests.support.servers.running import Tenant

pytestmark = pytest.mark.attack

_MB = 1_000_000
_FILES = 400
_CHUNKED = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"


def flood(server: ConfinedServer, beginning: bytes, piece: bytes, size: int) -> int:
    """Send this many bytes over as many connections as needed, and return the number of connections."""
    sent = connections = 0
    while sent < size:
        connections += 1
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", server.port), timeout=30) as one:
            one.sendall(beginning)
            while sent < size:
                one.sendall(piece)
                sent += len(piece)
        sent += len(piece)
    return connections


class Watcher:
    """Records the slowest health check and the peak memory while something runs."""

    def __init__(self, server: ConfinedServer) -> None:
        self.server = server
        self.slowest = 0.0
        self.most = 0

    @contextlib.contextmanager
    def watching(self) -> Iterator["Watcher"]:
        over = threading.Event()

        def look() -> None:
            while not over.is_set():
                started = time.monotonic()
                assert httpx.get(f"{self.server.url}/api/v1/healthz", timeout=60, trust_env=False).is_success
                self.slowest = max(self.slowest, time.monotonic() - started)
                self.most = max(self.most, self.server.rss())

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield self
        finally:
            over.set()
            thread.join()


@pytest.mark.parametrize(
    ("beginning", "piece", "size"),
    [
        (b"GET / HTTP/1.1\r\n", b"X-Header: " + b"x" * 1000 + b"\r\n", 100 * _MB),
        (b"GET / HTTP/1.1\r\nX-Header: ", b"x" * 65_536, 200 * _MB),
        (b"GET /", b"x" * 65_536, 100 * _MB),
        (_CHUNKED + b"1\r\nx\r\n0\r\n", b"X-Header: " + b"x" * 1000 + b"\r\n", 100 * _MB),
        (b"", b"GET /api/v1/healthz HTTP/1.1\r\n\r\n" * 1000, 100 * _MB),
    ],
    ids=["many headers", "one header", "one URL", "trailers", "pipelined requests"],
)
def test_headers_cost_no_memory(
    confined_server: Callable[..., ConfinedServer], beginning: bytes, piece: bytes, size: int
) -> None:
    server = confined_server()
    before = server.rss()
    with Watcher(server).watching() as seen:
        connections = flood(server, beginning, piece, size)
    grown = (seen.most - before) // _MB
    print(f"\n{connections} connections, memory +{grown} MB, slowest health check {seen.slowest:.2f} s")
    assert grown < 100
    assert seen.slowest < 20


def test_silent_connections_do_not_take_the_files(
    confined_server: Callable[..., ConfinedServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """500 silent connections with a limit of 400 open files, while an honest tenant trains and saves all the time."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_FILES, limit[1]))  # the server inherits the limit and may not raise it
    start = ConfinedServer.spawn

    def with_few_files(self: ConfinedServer) -> ConfinedServer:
        spawned = start(self)
        assert spawned.process is not None
        resource.prlimit(spawned.process.pid, resource.RLIMIT_NOFILE, (_FILES, _FILES))
        return spawned

    monkeypatch.setattr(ConfinedServer, "spawn", with_few_files)
    try:
        server = confined_server()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(limit[0], 2000) if limit[1] >= 2000 else limit[0], limit[1]))
    tenant = Tenant(server.url, "tml-honest")
    model = tenant.model()
    silent: list[socket.socket] = []
    for number in range(500):
        with contextlib.suppress(OSError):
            silent.append(socket.create_connection(("127.0.0.1", server.port), timeout=30))
            silent[-1].sendall(b"" if number % 2 else b"POST /api/v1/optim_step HTTP/1.1\r\nHost: x\r\n")
    saved, seq, deadline = 0, 1, time.monotonic() + 120
    while time.monotonic() < deadline:
        honest = Tenant(server.url, tenant.key)  # over a new connection
        with contextlib.suppress(httpx.TransportError):
            honest.json(honest.save(model, seq, f"ck{seq}"))
            saved, seq = saved + 1, seq + 1
        honest.http.close()
        time.sleep(0.5)
    still_open = sum(map(is_open, silent))
    print(f"\n{saved} saves in 30 s, {still_open} of {len(silent)} silent connections open")
    for connection in silent:
        connection.close()
    assert saved > 20
    assert still_open == 0
    assert "Too many open files" not in server.log()


def is_open(connection: socket.socket) -> bool:
    connection.settimeout(0.01)
    try:
        while connection.recv(4096):
            pass
    except TimeoutError:
        return True
    except OSError:
        return False
    return False
