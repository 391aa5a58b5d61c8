"""Messages between the server and a worker, over the worker's stdin and stdout.

A frame is two lengths, a header in JSON and a body of bytes: what a client sent, or what it gets. Bodies are not looked
at on the way, so that large ones cost the server nothing but their memory.
"""

import asyncio
import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO, Literal

__all__ = ["Frame", "FrameTooLargeError", "Outcome", "Settings", "pack", "read_frame", "receive_frame"]

_LENGTHS = struct.Struct(">IQ")
_MOST_HEADER_BYTES = 2**20

# What became of a request: its answer follows, or the user's mistake, the name of the argument that is no processor of
# the session, something that is over, a tenant's limit that is reached, or a mistake of ours.
Outcome = Literal["ok", "user", "unknown", "gone", "quota", "failed"]


@dataclass(frozen=True)
class Frame:
    header: Mapping[str, Any]
    body: bytes


@dataclass(frozen=True)
class Settings:
    """The first header a worker gets. ``tokenizers``: names of served models to folders, null for a model without."""

    allowed_dirs: tuple[str, ...]
    tokenizers: Mapping[str, str | None]
    cache_dir: str
    memory_bytes: int
    answer_bytes: int
    hub_bytes: int = 2**30  # the most that is fetched of a hub's repository for its tokenizer
    disk_bytes: int = 2**62  # of the worker's own directory, in which its datasets are cached

    @classmethod
    def from_header(cls, header: Mapping[str, Any]) -> "Settings":
        return cls(**{**header, "allowed_dirs": tuple(header["allowed_dirs"])})

    def to_header(self) -> dict[str, Any]:
        return asdict(self)


def pack(header: Mapping[str, Any], body: bytes = b"") -> list[bytes]:
    """The parts of a frame, to be written one after another: a large body is not copied."""
    text = json.dumps(header).encode()
    return [_LENGTHS.pack(len(text), len(body)) + text, body]


def read_frame(stream: BinaryIO) -> Frame | None:
    """The next frame; None at the end of the stream."""
    lengths = stream.read(_LENGTHS.size)
    if len(lengths) < _LENGTHS.size:
        return None
    header_bytes, body_bytes = _LENGTHS.unpack(lengths)
    header, body = stream.read(header_bytes), stream.read(body_bytes)
    return None if len(body) < body_bytes else Frame(json.loads(header), body)


class FrameTooLargeError(Exception):
    """A worker wants to send more than it may."""


async def receive_frame(stream: asyncio.StreamReader, most_bytes: int) -> Frame:
    """Return the next frame for the server; IncompleteReadError at the end of the stream.

    The lengths come first: what is larger than ``most_bytes`` is never in the server's memory.
    """
    header_bytes, body_bytes = _LENGTHS.unpack(await stream.readexactly(_LENGTHS.size))
    if header_bytes > _MOST_HEADER_BYTES or body_bytes > most_bytes:
        raise FrameTooLargeError(f"an answer of {header_bytes + body_bytes} bytes, allowed: at most {most_bytes}")
    header = await stream.readexactly(header_bytes)
    return Frame(json.loads(header), await stream.readexactly(body_bytes))
