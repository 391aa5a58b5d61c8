"""A stand-in for a model behind OpenAI's chat completions: it gives scripted answers and records the requests."""

import json
import threading
from collections.abc import Mapping, Sequence
from http.client import HTTPMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self


class ChatEndpoint:
    """Answers each request with the next of ``answers``, and with the last one again when they are used up.

    An answer is a message, with ``finish_reason`` if it is not "stop"; a list of them for several choices; a number,
    which is the status of a failure; or a text, which is the body as it is. ``requests`` holds path, headers and body.
    """

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.requests: list[tuple[str, HTTPMessage, dict[str, Any]]] = []
        self._lock = threading.Lock()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, kind, content = endpoint._answer(self.path, self.headers, body)
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()

    def script(self, *answers: Any) -> None:
        """Set the next answers and forget the requests."""
        self.answers, self.requests = list(answers), []

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [body for _, _, body in self.requests]

    def _answer(self, path: str, headers: HTTPMessage, body: dict[str, Any]) -> tuple[int, str, bytes]:
        with self._lock:
            self.requests.append((path, headers, body))
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, int):
            return answer, "application/json", json.dumps({"error": {"message": "scripted failure"}}).encode()
        if isinstance(answer, str):
            return 200, "application/json", answer.encode()
        choices = [answer] if isinstance(answer, Mapping) else answer
        if body.get("stream"):
            return 200, "text/event-stream", b"".join(_events(choices))
        return 200, "application/json", json.dumps(_completion(choices)).encode()


def _completion(choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "stub",
        "choices": [
            {
                "index": index,
                "finish_reason": choice.get("finish_reason", "stop"),
                "message": {"role": "assistant", **{key: choice[key] for key in choice if key != "finish_reason"}},
            }
            for index, choice in enumerate(choices)
        ],
    }


def _events(choices: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Return server-sent events. The text comes in two pieces, and so do the arguments of a tool call."""
    (choice,) = choices
    text = choice.get("content") or ""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": text[:3]}, {"content": text[3:]}]
    for index, call in enumerate(choice.get("tool_calls") or []):
        arguments = call["function"]["arguments"]
        first = {"name": call["function"]["name"], "arguments": arguments[:2]}
        deltas.append({"tool_calls": [{"index": index, "id": call["id"], "type": "function", "function": first}]})
        deltas.append({"tool_calls": [{"index": index, "function": {"arguments": arguments[2:]}}]})
    events = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": choice.get("finish_reason", "stop")}]})
    lines = [{"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "s", **e} for e in events]
    return [f"data: {json.dumps(line)}\n\n".encode() for line in lines] + [b"data: [DONE]\n\n"]
