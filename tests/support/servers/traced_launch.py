"""Run ``twinkle-server`` and record which of its functions run between a route handler and the trainer, in all threads.

The first argument is a file. After each call of the trainer it holds, as JSON, the functions that ran since the last
handler began, in the order of their first calls: lists ``[file, function, handed]``, where ``handed`` says whether one
of the arguments was the request in one of its forms. The other arguments go to twinkle-server.
"""

import json
import sys
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import twinkle
from tests.support.servers.tuned_launch import end_with_parent
from twinkle.server.cli import command_line

SOURCE = Path(twinkle.__file__).parent
HANDLERS = {
    ("server/protocols/tinker/training.py", "forward_backward"),
    ("server/protocols/native/model_routes.py", "run_verb"),
}
TRAINER = ("server/backends/mock/trainer.py", "MockTrainer.forward_backward")
SOCKETS = "server/http/connections.py"  # bytes arrive here, before handlers run and while they run
# The types of a request on its way: the handler's argument, then an op, its place in a batch, a trainer's item.
FORMS = {"Call", "Op", "TrainPass", "NativePass", "Batch", "Task", "TrainItem"}
TOKENS = (7, 11, 13, 17, 19, 23, 29, 31)  # the tokens that the test sends, by which a body is recognized
MARKS = (b"".join(token.to_bytes(4, "little") for token in TOKENS), b",".join(b"%d" % token for token in TOKENS))


class Trace:
    """The functions that ran since the last route handler began."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._handler: FrameType | None = None  # the frame of the current request's handler
        self._seen: dict[tuple[str, str], bool] | None = None  # None: no request is on its way to the trainer
        self._places: dict[CodeType, tuple[str, str] | None] = {}

    def note(self, frame: FrameType, event: str, _: object) -> None:
        place = self._place(frame.f_code) if event == "call" else None
        if place is not None:
            with self._lock:
                self._note(place, frame)

    def _note(self, place: tuple[str, str], frame: FrameType) -> None:
        if place in HANDLERS and frame is not self._handler:  # ignore a coroutine that resumes
            self._handler, self._seen = frame, {}
        if self._seen is None:
            return
        self._seen[place] = self._seen.get(place) or any(map(is_request, arguments(frame)))
        if place == TRAINER:
            self._file.write_text(json.dumps([[*place, handed] for place, handed in self._seen.items()]))
            self._seen = None

    def _place(self, code: CodeType) -> tuple[str, str] | None:
        if code not in self._places:
            path = Path(code.co_filename)
            file = str(path.relative_to(SOURCE)) if path.is_relative_to(SOURCE) else SOCKETS
            is_step = file != SOCKETS and not code.co_name.startswith("<")
            self._places[code] = (file, code.co_qualname) if is_step else None
        return self._places[code]


def arguments(frame: FrameType) -> Iterable[Any]:
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount
    return [frame.f_locals[name] for name in code.co_varnames[:count] if name in frame.f_locals]


def is_request(value: Any, depth: int = 2) -> bool:
    if isinstance(value, bytes | bytearray | memoryview):
        plain = bytes(value).replace(b" ", b"")
        return any(mark in plain for mark in MARKS)
    if type(value).__name__ in FORMS:
        return True
    if hasattr(value, "reshape") and not isinstance(value, type):  # an array or a tensor
        return tuple(value.reshape(-1).tolist()[: len(TOKENS)]) == TOKENS
    if isinstance(value, list) and all(isinstance(each, int) for each in value):
        return tuple(value) == TOKENS
    if depth and isinstance(value, Mapping):
        return any(is_request(each, depth - 1) for each in value.values())
    return depth > 0 and isinstance(value, list | tuple) and any(is_request(each, depth - 1) for each in value)


if __name__ == "__main__":
    end_with_parent()
    trace = Trace(Path(sys.argv[1]))
    threading.setprofile(trace.note)  # for threads that start from now on
    sys.setprofile(trace.note)
    sys.exit(command_line.main(sys.argv[2:]))
