"""Connections that no real client makes: cut off, slow, abandoned, or far too many. Honest tenants are not affected."""

import contextlib
import random
import resource
import socket
import struct
import threading
import time

import pytest

from tests.support.servers.running import Server, Tenant, key_for, training_body

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset, as when a remote process is killed


class Raw:
    """An API key, and raw bytes for a socket."""

    def __init__(self, server: Server, name: str) -> None:
        self.server = server
        self.key = key_for(name)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port), timeout=60)

    def request(self, path: str, body: bytes, kind: str = "application/x-protobuf", length: int | None = None) -> bytes:
        head = (
            f"POST /api/v1/{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nX-API-Key: {self.key}\r\n"
            f"Content-Type: {kind}\r\nContent-Length: {len(body) if length is None else length}\r\n\r\n"
        )
        return head.encode() + body


def results(server: Server, name: str) -> list[bytes]:
    """Return the results of an honest tenant."""
    tenant = Tenant(server.url, key_for(name))
    model = tenant.model()
    futures = [tenant.forward_backward(model, 1), tenant.optim_step(model, 2), tenant.forward_backward(model, 3)]
    return [tenant.result(future) for future in futures]


def hang_up(connection: socket.socket, draw: random.Random) -> None:
    with contextlib.suppress(OSError):
        match draw.randrange(3):
            case 0:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            case 1:
                connection.shutdown(socket.SHUT_WR)
    connection.close()


def cut_off(server: Server, draw: random.Random, count: int) -> None:
    """Send requests that end anywhere: in their head, in their body, or after more bytes than announced."""
    raw = Raw(server, "who is cut off")
    model = Tenant(server.url, raw.key).model()
    for number in range(count):
        whole = raw.request("forward_backward", training_body(model, number + 1))
        with contextlib.suppress(OSError), raw.connect() as connection:
            match draw.randrange(3):
                case 0:
                    connection.sendall(whole[: draw.randrange(len(whole))])
                case 1:
                    connection.sendall(whole + draw.randbytes(draw.randint(1, 300)))
                case 2:
                    connection.sendall(whole.replace(b"HTTP/1.1", draw.choice((b"HTTP/9.9", b"", b"\x00"))))
            hang_up(connection, draw)


def vanish(server: Server, draw: random.Random, count: int) -> None:
    """Open clients that wait for a result and disconnect before it arrives."""
    raw = Raw(server, "who vanishes")
    tenant = Tenant(server.url, raw.key)
    model = tenant.model()
    waiting = tenant.forward_backward(model, 2)  # waits, because number 1 is missing
    body = f'{{"request_id": "{waiting}"}}'.encode()
    connections = [raw.connect() for _ in range(count)]
    for connection in connections:
        connection.sendall(raw.request("retrieve_future", body, "application/json"))
    time.sleep(0.2)
    for connection in connections:
        hang_up(connection, draw)
    tenant.forward_backward(model, 1)
    assert tenant.loss(waiting) > 0


def send_slowly(server: Server, count: int, steps: int, pause: float) -> list[bytes]:
    """Send all requests at once, a few bytes at a time; return the answers."""
    raw = Raw(server, "who is slow")
    model = Tenant(server.url, raw.key).model()
    bodies = [raw.request("forward_backward", training_body(model, number + 1)) for number in range(count)]
    connections = [raw.connect() for _ in bodies]
    size = max(map(len, bodies)) // steps + 1
    for step in range(steps):
        for connection, body in zip(connections, bodies, strict=True):
            connection.sendall(body[step * size : (step + 1) * size])
        time.sleep(pause)
    answers = [connection.recv(4096) for connection in connections]
    for connection in connections:
        connection.close()
    return answers


def crowd(server: Server, count: int) -> None:
    """Open many connections that send nothing, or only the start of a request, and drop them all."""
    most, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < count + 500:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, count + 500), hard))
    raw = Raw(server, "a crowd")
    connections = []
    for number in range(count):
        connections.append(raw.connect())
        if number % 2:
            connections[-1].sendall(b"POST /api/v1/optim_step HTTP/1.1\r\nHost: 127.0.0.1\r\n")
    assert results(server, "who comes while there is a crowd")
    for connection in connections:
        connection.close()


def test_a_few_of_each(target: Server) -> None:
    expected = results(target, "before")
    draw = random.Random(1)
    cut_off(target, draw, 40)
    vanish(target, draw, 20)
    for answer in send_slowly(target, 8, 4, 0.02):
        assert answer.startswith(b"HTTP/1.1 200")
    crowd(target, 200)
    assert results(target, "after") == expected


@pytest.mark.fuzz
def test_thousands(target: Server) -> None:
    """All kinds at once, next to a tenant whose results must be those of a quiet server."""
    expected = results(target, "quiet day")
    over, rounds = threading.Event(), []

    def watch() -> None:
        while not over.is_set():
            rounds.append(results(target, f"watcher {len(rounds)}") == expected)

    watcher = threading.Thread(target=watch)
    watcher.start()
    seed = time.time_ns()
    print(f"\nseed {seed}")
    try:
        for turn in range(5):
            draw = random.Random(seed + turn)
            cut_off(target, draw, 500)
            vanish(target, draw, 200)
            crowd(target, 2000)
        assert all(answer.startswith(b"HTTP/1.1 200") for answer in send_slowly(target, 200, 20, 0.2))
    finally:
        over.set()
        watcher.join(120)
    assert rounds
    assert all(rounds)
