"""The messages between a client, the server and a worker.

Server and worker exchange frames over the worker's stdin and stdout. A frame is two lengths, a JSON header and a body
of bytes: the request of a client, or the answer to it. The server parses only the rows of batches that training
requests refer to; any other large body costs it little more than memory.

Results go to clients as JSON (:func:`to_json`). A request that a client sends twice with the same idempotency key is
executed once, and both get the same answer (:class:`Answers`).
"""

import asyncio
import base64
import json
import struct
import sys
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time
from typing import Any, BinaryIO, Literal

import numpy as np

from twinkle.errors import InvalidInputError, OverloadedError, QuotaError, ShuttingDownError, UnsupportedError
from twinkle.images import EncodedImage
from twinkle.server.wire.image_files import data_uri

_LENGTHS = struct.Struct(">IQ")
_MOST_HEADER_BYTES = 2**20

# How a request ended, and what the body of the answer holds: ok: the answer; user: the message of the user's mistake;
# unknown: the name of the argument that names no processor of the session; gone: the message that something is over;
# quota: the size of a batch for which the limits leave no room; failed: the message of a failure of the server.
Outcome = Literal["ok", "user", "unknown", "gone", "quota", "failed"]


@dataclass(frozen=True)
class Frame:
    header: Mapping[str, Any]
    body: bytes


@dataclass(frozen=True)
class Settings:
    """The first header that a worker receives.

    ``tokenizers`` maps the names of served models to the folders of their tokenizers; None: a model without one.
    ``answer_bytes``: the most bytes of an answer. ``memory_bytes``: the worker's limit of memory.
    """

    allowed_dirs: Sequence[str]
    tokenizers: Mapping[str, str | None]
    cache_dir: str
    memory_bytes: int
    answer_bytes: int
    hub_bytes: int = 2**30  # the most bytes fetched from a hub's repository for its tokenizer
    disk_bytes: int = 2**62  # limit of the worker's own directory, in which its datasets are cached


def pack(header: Mapping[str, Any], body: bytes = b"") -> list[bytes]:
    """Return the parts of a frame, to be written one after another: a large body is not copied."""
    text = json.dumps(header).encode()
    return [_LENGTHS.pack(len(text), len(body)) + text, body]


def read_frame(stream: BinaryIO) -> Frame | None:
    """Return the next frame; None at the end of the stream."""
    lengths = stream.read(_LENGTHS.size)
    if len(lengths) < _LENGTHS.size:
        return None
    header_bytes, body_bytes = _LENGTHS.unpack(lengths)
    header, body = stream.read(header_bytes), stream.read(body_bytes)
    return None if len(body) < body_bytes else Frame(json.loads(header), body)


class FrameTooLargeError(Exception):
    """The answer of a worker is larger than allowed."""


async def receive_frame(stream: asyncio.StreamReader, most_bytes: int) -> Frame:
    """Return the next frame from a worker; IncompleteReadError at the end of the stream.

    The lengths come first, so a body of more than ``most_bytes`` is refused (FrameTooLargeError) before it is in the
    server's memory.
    """
    header_bytes, body_bytes = _LENGTHS.unpack(await stream.readexactly(_LENGTHS.size))
    if header_bytes > _MOST_HEADER_BYTES or body_bytes > most_bytes:
        raise FrameTooLargeError(f"an answer of {header_bytes + body_bytes} bytes, allowed: at most {most_bytes}")
    header = await stream.readexactly(header_bytes)
    return Frame(json.loads(header), await stream.readexactly(body_bytes))


def to_json(value: object) -> str:
    """Return a value as JSON; UnsupportedError for objects that it cannot hold.

    Arrays and tensors become lists, NaN and infinity null, dates and times text, bytes base64, image files data URIs.
    """
    try:
        return json.dumps(value, allow_nan=False, default=_listed)
    except ValueError:  # a number that is not finite: the rare case may take longer
        return json.dumps(json.loads(json.dumps(value, default=_listed), parse_constant=lambda _name: None))


def _listed(value: object) -> object:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, EncodedImage):
        return data_uri(value)
    if isinstance(value, Mapping):
        return dict(value)
    torch = sys.modules.get("torch")  # without this import there are no tensors
    if torch is not None and isinstance(value, torch.Tensor):
        return value.tolist()
    raise UnsupportedError(f"result: {type(value).__name__} cannot be sent as JSON; allowed: numbers, text and lists")


_KEPT = 64
_KEPT_BYTES = 16 * 2**20  # of one session, its newest answer not counted


@dataclass(frozen=True)
class _Entry:
    digest: bytes
    task: asyncio.Task[bytes]

    @property
    def size(self) -> int:
        """Return the bytes of the answer; 0 if there is none yet, or it is an error."""
        done = self.task.done() and not self.task.cancelled() and self.task.exception() is None
        return len(self.task.result()) if done else 0


class Answers:
    """The newest answers to one session's requests, by idempotency key: at most 64, and about 16 MiB.

    Older ones are forgotten: clients repeat a request soon or never.
    """

    def __init__(self) -> None:
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    async def once(self, key: str | None, digest: bytes, work: Callable[[], Awaitable[bytes]]) -> bytes:
        """Run ``work`` if this key is new, else wait for the work that the key began; return or raise its outcome.

        Without a key, ``work`` always runs. A key counts as new again if its work was refused by a limit. ``digest`` is
        that of the request: a key that comes again with another digest is refused. The work goes on if the client that
        waits for it disconnects.
        """
        if key is None:
            return await asyncio.shield(asyncio.ensure_future(work()))
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry(digest, asyncio.create_task(self._work(key, work)))
        elif entry.digest != digest:
            raise InvalidInputError("X-Idempotency-Key header", key, "a key not used before for another request")
        return await asyncio.shield(entry.task)

    async def _work(self, key: str, work: Callable[[], Awaitable[bytes]]) -> bytes:
        try:
            answer = await work()
        except (OverloadedError, QuotaError, ShuttingDownError):
            del self._entries[key]  # nothing was done: the same key may try again
            raise
        finally:
            self._forget_old()
        return answer

    def _forget_old(self) -> None:
        done = [key for key, entry in self._entries.items() if entry.task.done()]
        kept = sum(self._entries[key].size for key in done)
        for key in done:
            if len(self._entries) <= _KEPT and kept <= _KEPT_BYTES:
                return
            kept -= self._entries.pop(key).size
