"""A server that records its requests, gives the answers that a test sets, and fails on demand.

stub.answer("/model/m/twinkle/save", {"twinkle_path": "twinkle://r/weights/x"})
stub.fail("/model/m/twinkle/save", Drop(), Status(503))     # the next two requests, in this order
stub.bodies("/model/m/twinkle/save")                        # the parsed bodies of all requests so far
"""

import json
import threading
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SESSION = "session_0123456789abcdef0123456789abcdef"

ANSWERS = {
    "/twinkle/create_session": {"session_id": SESSION},
    "/twinkle/session_heartbeat": {},
    "/twinkle/finish_session": {},
    "/twinkle/healthz": {"status": "ok"},
}


@dataclass(frozen=True)
class Drop:
    """Read the request and close the connection without an answer."""


@dataclass(frozen=True)
class Cut:
    """Close the connection in the middle of the answer."""


@dataclass(frozen=True)
class Slow:
    """Delay the answer by this many seconds."""

    seconds: float


@dataclass(frozen=True)
class Status:
    code: int
    body: Any = field(default_factory=lambda: {"detail": "try again"})
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Asked:
    method: str
    path: str  # without /api/v1 and without the query
    query: str
    headers: Mapping[str, str]
    body: Any
    connection: int


class StubServer:
    def __init__(self) -> None:
        self.requests: list[Asked] = []
        self.answers: dict[str, Any] = dict(ANSWERS)
        self.faults: dict[str, deque[Any]] = defaultdict(deque)
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def answer(self, path: str, content: Any) -> None:
        self.answers[path] = content

    def fail(self, path: str, *faults: Any) -> None:
        self.faults[path].extend(faults)

    def asked(self, path: str) -> list[Asked]:
        return [asked for asked in self.requests if asked.path == path]

    def bodies(self, path: str) -> list[Any]:
        return [asked.body for asked in self.asked(path)]

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


def _handler(stub: StubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            text = self.rfile.read(length)
            path, _, query = self.path.removeprefix("/api/v1").partition("?")
            body = json.loads(text) if text else None
            headers = {name.lower(): value for name, value in self.headers.items()}
            stub.requests.append(Asked(self.command, path, query, headers, body, self.client_address[1]))
            # None in the queue: this request does not fail
            fault = stub.faults[path].popleft() if stub.faults[path] else None
            if isinstance(fault, Drop):
                self.close_connection = True
                return
            if isinstance(fault, Slow):
                time.sleep(fault.seconds)
            if isinstance(fault, Status):
                self._send(fault.code, fault.body, fault.headers)
                return
            if path not in stub.answers:
                self._send(404, {"detail": f"no route {path}"})
                return
            content = stub.answers[path]
            self._send(200, content(body) if callable(content) else content, cut=isinstance(fault, Cut))

        do_GET = do_POST = do_DELETE = handle_any

        def _send(self, code: int, content: Any, headers: Mapping[str, str] | None = None, cut: bool = False) -> None:
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(code)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2] if cut else data)
            if cut:
                self.close_connection = True

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler
