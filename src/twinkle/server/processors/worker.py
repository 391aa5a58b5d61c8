"""The process that holds one session's objects: ``python -m twinkle.server.processors.worker``.

It answers one request after another. It exits when its stdin is closed, even in the middle of a request: then the
server is gone and no client waits. What libraries print goes to stderr, which is the server's log.
"""

import contextlib
import ctypes
import json
import logging
import os
import queue
import re
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Any, BinaryIO

from twinkle.environment import read_environment, set_variable_defaults
from twinkle.errors import GoneError, InvalidInputError, TwinkleError, UnsupportedError, UserError
from twinkle.server.processors import catalog
from twinkle.server.processors.arguments import Context, class_named, read_arguments
from twinkle.server.processors.live import KeptBatches, LiveObjects, NoRoomError, UnknownProcessorError
from twinkle.server.processors.messages import Frame, Outcome, Settings, pack, read_frame, to_json
from twinkle.server.processors.operations import JsonText
from twinkle.server.processors.sources import Sources
from twinkle.server.verbs.features import FIELDS, UNSUPPORTED, image_columns

logger = logging.getLogger(__name__)

_OUR_PATHS = re.compile(r"(?<![\w./:-])(/[\w.@+~-]+){2,}/?")
_FIRST_TO_DIE = "1000"  # OOM score: if the machine runs out of memory, the kernel kills workers before the server
_PR_SET_PDEATHSIG = 1  # prctl option: the signal that a process gets when its parent ends
_NICENESS = 5  # training and requests come first


class Workbench:
    """The objects of one session, and the requests about them: bodies of clients' requests in, JSON out.

    :meth:`reply` answers every frame and never raises; the methods that it calls raise.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.objects = LiveObjects(KeptBatches(settings.answer_bytes))
        allowed = [Path(directory) for directory in settings.allowed_dirs]
        sources = Sources(allowed, settings.tokenizers, Path(settings.cache_dir), settings.hub_bytes)
        self._context = Context(self.objects, sources)

    def create(self, body: bytes) -> str:
        """Make the object that a request asks for and return its id."""
        request = _parsed(body)
        kind, name = _taken(request, "processor_type"), _taken(request, "class_type")
        entry = catalog.entry(kind, name)
        options = read_arguments(name, entry.options, request, self._context)
        made = entry.make(class_named("class_type", name, {name: entry.home}), options, self._context)
        return self.objects.add(kind, name, made).processor_id

    def call(self, body: bytes) -> str:
        """Call a function of an object and return its result as JSON."""
        request = _parsed(body)
        live = self.objects.get("processor_id", _taken(request, "processor_id"))
        name = _taken(request, "function")
        function = catalog.function(live.processor_type, live.class_name, name)
        arguments = read_arguments(f"{live.class_name}.{name}", function.arguments, request, self._context)
        result = function.run(live, arguments, self._context)
        return result.text if isinstance(result, JsonText) else to_json(result)

    def batch(self, processor_id: str, number: int) -> str:
        """Return the rows of a batch that is kept, one line of JSON each, so that the server can parse them one by one.

        Rows that have tokens are reduced to the columns that training reads or refuses.
        """
        live = self.objects.get("processor_id", processor_id)
        if live.processor_type != "dataloader":
            raise InvalidInputError("processor_id", f"a {live.processor_type}", "a dataloader")
        text = self.objects.batches.get(processor_id, number)
        if not text.startswith("["):
            raise UnsupportedError("inputs: batches of set_processor are not rows; leave it out, or fetch the batch")
        return "\n".join(json.dumps(_for_training(row)) for row in json.loads(text))

    # --- frames -------------------------------------------------------------------------------------------------------

    def reply(self, request: Frame) -> list[bytes]:
        outcome: Outcome = "ok"
        batches = self.objects.batches
        batches.limit = request.header.get("batch_bytes", batches.limit)
        try:
            body = self._answer(request)
        except UserError as error:
            outcome, body = "user", self._shown(error)
        except UnknownProcessorError as error:
            outcome, body = "unknown", error.field
        except GoneError as error:
            outcome, body = "gone", str(error)
        except NoRoomError as error:
            outcome, body = "quota", str(error.size)
        except MemoryError:
            limit = self._settings.memory_bytes / 2**30
            outcome, body = "user", f"this needs more than the {limit:g} GiB of limits.processor_memory_gib"
        except Exception as error:  # an edge: with a client's data any library may fail in any way
            logger.exception("%s failed", request.header["op"])
            outcome, body = self._unexpected(error)
        state = {"outcome": outcome, "live": self.objects.ids(), "kept_bytes": batches.used}
        return pack(state, body.encode())

    def _answer(self, request: Frame) -> str:
        match request.header["op"]:
            case "create":
                return self.create(request.body)
            case "call":
                return '{"result": ' + self._within_limit(self.call(request.body)) + "}"
            case "batch":
                return self._within_limit(self.batch(request.header["processor_id"], request.header["number"]))
        raise AssertionError(request.header)

    def _within_limit(self, text: str) -> str:
        if len(text) > self._settings.answer_bytes:  # JSON as we write it is ASCII
            raise UserError(f"result: {len(text)} bytes of JSON, allowed: at most {self._settings.answer_bytes}")
        return text

    def _unexpected(self, error: Exception) -> tuple[Outcome, str]:
        """Return outcome and message for an unexpected error. Most come from wrong data; the log has all details."""
        if isinstance(error, OSError) and not isinstance(error, TwinkleError):
            return "failed", "the server could not read or write a file; its log has the details"
        return "user", f"{type(error).__name__}: {_OUR_PATHS.sub('…', self._shown(error))[:2000]}"

    def _shown(self, error: Exception) -> str:
        """Return the text of an error, with names of served models in the place of their folders."""
        text = str(error)
        for name, folder in self._settings.tokenizers.items():
            text = text if folder is None else text.replace(folder, name)
        return text


def _for_training(row: Any) -> Any:
    if not isinstance(row, dict) or row.get("input_ids") is None:
        return row
    columns = {name: row[name] for name in (*FIELDS, *UNSUPPORTED) if row.get(name) is not None}
    return {**columns, **image_columns(row)}


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        request = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError("body", body[:60], f"JSON ({str(error)[:120]})") from None
    if not isinstance(request, dict):
        raise InvalidInputError("body", request, "a JSON object")
    return request


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _taken(request: dict[str, Any], key: str) -> str:
    value = request.pop(key, None)
    if not isinstance(value, str):
        raise InvalidInputError(key, value, "text")
    return value


# --- the process ------------------------------------------------------------------------------------------------------


def main() -> None:
    requests, replies = _own_pipes()
    first = read_frame(requests)
    if first is None:
        return
    settings = Settings(**first.header)
    _restrict(settings)
    inbox: queue.SimpleQueue[Frame] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(requests, inbox), daemon=True).start()
    bench = Workbench(settings)
    while True:
        for part in bench.reply(inbox.get()):
            replies.write(part)
        replies.flush()


def _own_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Return the pipes of frames under new descriptors; stdin becomes empty, and stdout goes to the log.

    So a library that prints or reads stdin cannot disturb frames.
    """
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


def _restrict(settings: Settings) -> None:
    # RLIMIT_DATA counts a program's own data, not mapped files and reserved addresses, of which torch has many.
    resource.setrlimit(resource.RLIMIT_DATA, (settings.memory_bytes, settings.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.umask(0o077)  # other users of the machine must not read a tenant's rows in files that libraries write
    os.nice(_NICENESS)
    if sys.platform == "linux":  # a call into C may keep the interpreter from noticing that stdin is closed
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_DIE)
    environment = read_environment()
    logging.basicConfig(level=environment.log_level, format="[%(asctime)s][%(levelname)s:processor] %(message)s")
    set_variable_defaults(
        {
            "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            # tenants must not read from a hub with the operator's token
            "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
            **({"HF_HUB_OFFLINE": "1"} if environment.offline else {}),
        }
    )


def _receive(requests: BinaryIO, inbox: "queue.SimpleQueue[Frame]") -> None:
    while (frame := read_frame(requests)) is not None:
        inbox.put(frame)
    os._exit(0)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):  # Ctrl-C, or the server is gone
        main()
