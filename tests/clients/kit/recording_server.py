"""A server that records its requests and gives the smallest answers that a client of the native protocol accepts.

    with RecordingServer() as server:
        ...                                     # a client talks to server.url
    server.exchanges                            # in the order in which they arrived

``server.answers`` overrides the answer to the next request whose path ends with the key: a status and a body.
"""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any
from urllib.parse import urlsplit

SESSION = "session_" + "0a" * 16
RUN = f"{SESSION}-default"
BATCHES = [[{"input_ids": [1, 2, 3], "labels": [2, 3, -100]}]]

_TIME = "2026-01-01T00:00:00"
_CHECKPOINT = {
    "checkpoint_id": "weights/first",
    "checkpoint_type": "training",
    "time": _TIME,
    "size_bytes": 0,
    "twinkle_path": f"twinkle://{RUN}/weights/first",
}
_RUN = {"training_run_id": RUN, "base_model": "Qwen/Qwen3.5-4B", "model_owner": "owner", "last_request_time": _TIME}
_SEQUENCE = {
    "stop_reason": "length",
    "tokens": [5, 6],
    "logprobs": [[[5, -0.1]], [[6, -0.2]]],
    "decoded": "five six",
    "new_input_feature": {"input_ids": [1, 2, 5, 6], "labels": [-100, 5, 6, -100]},
}

_GATEWAY: dict[tuple[str, str], Any] = {
    ("POST", "create_session"): {"session_id": SESSION},
    ("POST", "session_heartbeat"): {},
    ("GET", "healthz"): {"status": "ok"},
    ("GET", "get_server_capabilities"): {"supported_models": [{"model_name": "Qwen/Qwen3.5-4B"}]},
    ("GET", "capacity_info"): {"max_loras": 5, "used_loras": 1, "free_loras": 4},
    ("GET", "training_runs"): {
        "training_runs": [_RUN],
        "cursor": {"limit": 20, "offset": 0, "total_count": 1},
    },
    ("GET", f"training_runs/{RUN}"): _RUN,
    ("GET", f"training_runs/{RUN}/checkpoints"): {"checkpoints": [_CHECKPOINT], "cursor": None},
    ("DELETE", f"training_runs/{RUN}/checkpoints/weights/first"): {"success": True, "message": "deleted"},
    ("GET", f"checkpoint_path/{RUN}/weights/first"): {
        "path": "/checkpoints/first",
        "twinkle_path": f"twinkle://{RUN}/weights/first",
    },
    ("POST", "weights_info"): {"training_run_id": RUN, "base_model": "Qwen/Qwen3.5-4B", "model_owner": "owner"},
}
_MODEL: dict[str, Any] = {
    "create": {"status": "ok"},
    "add_adapter_to_model": {"status": "ok", "adapter_name": RUN},
    **dict.fromkeys(("set_template", "set_processor", "set_loss", "set_optimizer", "set_lr_scheduler"), None),
    **dict.fromkeys(("add_metric", "apply_patch", "backward", "load"), None),
    **dict.fromkeys(("step", "zero_grad", "lr_step", "clip_grad_and_step"), None),
    "get_train_configs": {"result": "text"},
    "calculate_loss": {"result": 1.23},
    "calculate_metric": {"result": {"loss": None}},  # a number or text
    "clip_grad_norm": {"result": "0.51"},
    "get_state_dict": {"result": {}},
    "resume_from_checkpoint": {
        "result": {"cur_step": 1, "consumed_train_samples": 4, "gradient_accumulation_steps": 1}
    },
    "upload_to_hub": {"request_id": "upload_1"},
    "upload_status/upload_1": {"request_id": "upload_1", "status": "completed", "error": None},
}
_SAMPLER: dict[str, Any] = {
    "create": {"status": "ok"},
    "set_template": {"status": "ok"},
    "add_adapter_to_sampler": {"status": "ok", "adapter_name": "default"},
    "apply_patch": None,
    "sample": {"samples": [{"sequences": [_SEQUENCE]}]},
}
_CALLS: dict[str, Any] = {
    "__len__": 1,
    "__getitem__": BATCHES[0][0],
    "get_state": {"consumed_train_samples": 1},
}


@dataclass(frozen=True)
class Exchange:
    """One request and its answer."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: Any
    status: int
    answer: Any


class RecordingServer:
    """Listens on its own port, with one thread for each connection, until the ``with`` block ends."""

    def __init__(self) -> None:
        self.exchanges: list[Exchange] = []
        self.answers: dict[str, tuple[int, Any]] = {}
        self._lock = threading.Lock()
        self._processors = count(1)
        self._positions: dict[str, Iterator[Any]] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "RecordingServer":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def reply(self, method: str, target: str, headers: dict[str, str], body: Any) -> tuple[int, Any]:
        parts = urlsplit(target)
        with self._lock:
            status, answer = self._answer(method, parts.path, body)
            self.exchanges.append(Exchange(method, parts.path, parts.query, headers, body, status, answer))
        return status, answer

    def _answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        for ending in self.answers:
            if path.endswith(ending):
                return self.answers.pop(ending)
        service, _, verb = path.removeprefix("/api/v1/").partition("twinkle/")
        try:
            match service.partition("/")[0]:
                case "":
                    return 200, _GATEWAY[method, verb]
                case "model":
                    return 200, _model_answer(verb, body)
                case "sampler":
                    return 200, _SAMPLER[verb]
                case "processor":
                    return self._created() if verb == "create" else self._called(body)
        except KeyError:
            pass
        return 404, {"detail": f"the recording server does not know {method} {path}"}

    def _created(self) -> tuple[int, Any]:
        return 200, {"processor_id": f"pid:{next(self._processors):032x}"}

    def _called(self, body: dict[str, Any]) -> tuple[int, Any]:
        function, owner = body["function"], body["processor_id"]
        if function == "__iter__":
            self._positions[owner] = iter(BATCHES)
            return 200, {"result": "ok"}
        if function == "__next__":
            batch = next(self._positions[owner], None)
            return (410, {"detail": "Iterator exhausted"}) if batch is None else (200, {"result": batch})
        return 200, {"result": _CALLS.get(function)}


def _model_answer(verb: str, body: Any) -> Any:
    if verb == "save":
        kind = "sampler_weights" if body.get("is_sampler") else "weights"
        return {"twinkle_path": f"twinkle://{RUN}/{kind}/{body['name']}", "checkpoint_dir": "/checkpoints/x"}
    if verb.startswith("forward"):
        loss = 1.23 if verb == "forward_backward" else None
        return {"result": {"loss": loss, "logps": [[-0.5] * len(row["input_ids"]) for row in body["inputs"]]}}
    return _MODEL[verb]


def _handler(server: RecordingServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def handle_request(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = json.loads(content) if content else None
            status, answer = server.reply(self.command, self.path, dict(self.headers), body)
            reply = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        do_GET = do_POST = do_DELETE = handle_request

        def log_message(self, *_arguments: object) -> None:
            """Log nothing: the exchanges are the log."""

    return Handler
