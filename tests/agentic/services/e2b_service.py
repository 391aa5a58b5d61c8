"""A local service that speaks E2B's protocol: sandboxes are folders of this machine, commands run in bash.

REST routes create, extend and end sandboxes. Commands are a stream of the Connect protocol with JSON messages, each
behind a flag byte and its length in four bytes. Files are read and written by HTTP.
"""

import base64
import json
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message
from email.parser import BytesParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

_LAST_MESSAGE = 2  # the flag of the message that ends a stream


class Service:
    """The sandboxes of the service, and what it was asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = ""
        self.created: list[dict] = []
        self.keys: set[str] = set()
        self.timeouts: list[tuple[str, int]] = []
        self.killed: list[str] = []
        self.commands: list[str] = []

    def create(self, body: dict) -> dict:
        self.created.append(body)
        name = f"box{len(self.created)}"
        (self.folder / name).mkdir()
        return {"templateID": body["templateID"], "sandboxID": name, "clientID": "here", "envdVersion": "0.6.0"}

    def kill(self, name: str) -> None:
        self.killed.append(name)

    def path(self, sandbox: str, path: str) -> Path:
        return self.folder / sandbox / path.lstrip("/")

    def run(self, sandbox: str, config: dict) -> Iterator[dict]:
        self.commands.append(config["args"][-1])
        variables = {"PATH": "/usr/bin:/bin", **self.created[int(sandbox.removeprefix("box")) - 1].get("envVars", {})}
        done = subprocess.run(
            ["/bin/bash", "-c", config["args"][-1]], cwd=self.folder / sandbox, env=variables, capture_output=True
        )
        yield {"event": {"start": {"pid": 7}}}
        for stream, data in (("stdout", done.stdout), ("stderr", done.stderr)):
            if data:
                yield {"event": {"data": {stream: base64.b64encode(data).decode()}}}
        status = {"exitCode": done.returncode, "exited": True, "status": f"exit status {done.returncode}"}
        yield {"event": {"end": status}}


def handler_of(service: Service) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            if url.path == "/health":
                return self._send(204)
            path = service.path(self.headers["E2b-Sandbox-Id"], parse_qs(url.query)["path"][0])
            if not path.exists():
                return self._send(404, json.dumps({"code": 404, "message": f"{path.name} not found"}).encode())
            return self._send(200, path.read_bytes(), "application/octet-stream")

        def do_DELETE(self) -> None:
            service.kill(self.path.split("/")[-1])
            self._send(204)

        def do_POST(self) -> None:
            body = self._body()
            url = urlsplit(self.path)
            if url.path == "/process.Process/Start":
                if self.headers["E2b-Sandbox-Id"] in service.killed:
                    return self._send(502, json.dumps({"code": 502, "message": "The sandbox was not found"}).encode())
                request = json.loads(body[5:])
                messages = service.run(self.headers["E2b-Sandbox-Id"], request["process"])
                parts = [self._message(0, message) for message in messages] + [self._message(_LAST_MESSAGE, {})]
                return self._send(200, b"".join(parts), "application/connect+json")
            if url.path == "/files":
                return self._write_file(parse_qs(url.query), body)
            service.keys.add(self.headers.get("X-API-KEY", ""))
            if url.path.endswith("/timeout"):
                service.timeouts.append((url.path.split("/")[-2], json.loads(body)["timeout"]))
                return self._send(204)
            return self._send(201, json.dumps(service.create(json.loads(body))).encode())

        def _write_file(self, query: dict, body: bytes) -> None:
            data, name = body, query.get("path", [""])[0]
            if "multipart" in self.headers["Content-Type"]:
                head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
                part = BytesParser().parsebytes(head + body).get_payload()[0]
                assert isinstance(part, Message)
                data, name = part.get_payload(decode=True), name or part.get_filename()
            path = service.path(self.headers["E2b-Sandbox-Id"], name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            answer = [{"name": path.name, "type": "file", "path": name}]
            self._send(200, json.dumps(answer).encode())

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            found = b""
            while size := int(self.rfile.readline(), 16):
                found += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return found

        def _message(self, flag: int, message: dict) -> bytes:
            data = json.dumps(message).encode()
            return struct.pack(">BI", flag, len(data)) + data

        def _send(self, status: int, body: bytes = b"", kind: str = "application/json") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler


@contextmanager
def running(folder: Path) -> Iterator[Service]:
    service = Service(folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(service))
    service.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
