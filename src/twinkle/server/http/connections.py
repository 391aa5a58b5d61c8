"""Limits on connections that protect the server from clients without a key: bytes of headers, idle time, open files.

uvicorn's own protocol has no such limits. :class:`BoundedProtocol` adds them to it, and :class:`Connections` counts the
connections of the whole process. Everything here runs on the event loop of the server.
"""

import asyncio
import http
import ipaddress
import json
import logging
import os
import resource
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from twinkle.server.types import Tally

logger = logging.getLogger(__name__)

_MAX_BACKLOG = 4096
# Files that the server itself opens while it runs: the database, the journal, snapshots, checkpoints, processes.
_RESERVED_FILES = 512
# An idle connection that is younger than this is not closed to make room for a new one: its request is on the way.
_SETTLED_SECONDS = 1.0
# Clients hardly use pipelining today, but a few pipelined requests are not an attack.
_MAX_PIPELINED = 16
_MAX_PIPELINED_BODY = 2**20


@dataclass(frozen=True)
class ConnectionLimits:
    """The limits on connections. ``total`` and ``backlog`` follow from the number of files the process may open."""

    total: int = 60_000
    backlog: int = _MAX_BACKLOG
    per_address: int = 16_384
    header_bytes: int = 65_536  # of the request line and headers together; also of the trailers of a chunked body
    header_count: int = 256
    url_bytes: int = 16_384
    head_seconds: float = 20.0  # from the connection, or the first byte of a later request, to complete headers
    progress_seconds: float = 60.0  # the longest pause in sending a body, and in reading an answer
    check_seconds: float = 5.0  # how often each connection checks its timeouts


def connections_within_open_files(per_address: int, header_bytes: int) -> ConnectionLimits:
    """Return limits that leave enough of the process's open files for the server's own files.

    The event loop may accept a whole backlog of new connections before it closes the first one that is refused, so the
    backlog counts as open connections, too.
    """
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY:
        return ConnectionLimits(per_address=per_address, header_bytes=header_bytes)
    backlog = max(1, min(_MAX_BACKLOG, files // 8))
    total = files - _open_files() - min(_RESERVED_FILES, files // 4) - backlog
    return ConnectionLimits(total=max(1, total), backlog=backlog, per_address=per_address, header_bytes=header_bytes)


class Connections:
    """The registry of all connections of the process: their number by address, and those without a request."""

    def __init__(self, limits: ConnectionLimits, refused: Callable[[str], None] = lambda limit: None) -> None:
        """Begin without connections. ``refused``: called with the name of a limit that refuses or closes something."""
        self.limits = limits
        self.refused = refused
        self._open: set[BoundedProtocol] = set()
        self._by_address = Tally()
        # Idle connections, without a request under way, and the time since when; the longest idle one comes first.
        self._waiting: OrderedDict[BoundedProtocol, float] = OrderedDict()

    def admit(self, connection: "BoundedProtocol", address: str, now: float) -> "ConnectionRefusal | None":
        """Register a new connection, or return the refusal if a limit is reached.

        At the limit of all connections, the longest idle connection is closed to make room, if it has been idle for at
        least a second.
        """
        limits = self.limits
        if self._by_address[address] >= limits.per_address:
            key = "max_connections_per_address"
            text = f"connections from one address: {limits.per_address} are open (limits.{key})"
            return ConnectionRefusal(429, text, key)
        if len(self._open) >= limits.total and not self._evict(now):
            text = f"connections: {limits.total} are open, as many as open files allow"
            return ConnectionRefusal(503, text, "open_files")
        self._open.add(connection)
        self._by_address[address] += 1
        self._waiting[connection] = now
        return None

    def lost(self, connection: "BoundedProtocol", address: str) -> None:
        """Remove a closed connection. One that was refused is not registered, and is ignored."""
        if connection in self._open:
            self._open.discard(connection)
            self._waiting.pop(connection, None)
            self._by_address[address] -= 1

    def busy(self, connection: "BoundedProtocol") -> None:
        """Note that the headers of a request are complete: the connection is no longer idle."""
        self._waiting.pop(connection, None)

    def waiting(self, connection: "BoundedProtocol", now: float) -> None:
        """Note that all requests of the connection are answered: it is idle."""
        if connection in self._open:
            self._waiting[connection] = now
            self._waiting.move_to_end(connection)

    def _evict(self, now: float) -> bool:
        """Close the longest idle connection; return False if none has been idle for a second."""
        for connection, since in self._waiting.items():
            if now - since < _SETTLED_SECONDS:
                return False
            del self._waiting[connection]
            self.refused("open_files")
            connection.transport.abort()
            return True
        return False


@dataclass(frozen=True)
class ConnectionRefusal:
    """An error answer that the connection sends itself, without the application.

    ``limit``: the name under which /metrics counts it.
    """

    status: int
    text: str
    limit: str

    def response(self) -> bytes:
        body = json.dumps({"detail": self.text}).encode()
        retry = "retry-after: 1\r\n" if self.status in (429, 503) else ""
        head = (
            f"HTTP/1.1 {self.status} {http.HTTPStatus(self.status).phrase}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n{retry}connection: close\r\n\r\n"
        )
        return head.encode() + body


class _RefusedError(Exception):
    """Raised in a parser callback, to stop httptools in the middle of the data it was given."""


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with limits that apply before a key is checked.

    httptools collects the pieces of a header in memory and calls back only when the header is complete. Therefore bytes
    are counted in two ways: raw bytes as they arrive, as long as they complete nothing (``_unfinished_bytes``), and the
    names and values of headers once the head is complete (``_head_bytes``).
    """

    def __init__(
        self,
        connections: Connections,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._registry = connections
        self._limits = connections.limits
        self._address = ""
        self._refusal: ConnectionRefusal | None = None
        self._clock: asyncio.TimerHandle | None = None
        # The request that is being received:
        self._receiving = True  # it is not complete yet; a new connection counts as the beginning of a request
        self._in_head = True
        self._began = False  # its first byte has arrived
        self._since = 0.0  # when its head began, or its body last grew
        self._head_bytes = 0  # of its URL and its complete headers
        self._unfinished_bytes = 0  # arrived since a head last began or ended, or a body last grew
        self._progress = False  # whether the current piece of data began or ended a head, or added to a body
        # The answer that is being written:
        self._unsent = 0  # bytes that waited for the client to read them at the last check
        self._unsent_since = 0.0

    # --- the connection -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._address = _network(self.client[0]) if self.client else ""
        self._since = self.loop.time()
        self._refusal = self._registry.admit(self, self._address, self._since)
        if self._refusal is not None:
            self._refuse(self._refusal)
            return
        self._clock = self.loop.call_later(self._limits.check_seconds, self._check)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._clock is not None:
            self._clock.cancel()
        self._unset_keepalive_if_required()
        self._registry.lost(self, self._address)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._progress = False
        super().data_received(data)
        if self.parser is None or self.transport.is_closing():
            return
        if not self._progress:
            self._unfinished_bytes += len(data)
            if self._unfinished_bytes > self._limits.header_bytes:
                self._refuse(self._too_large())
                return
        if self.headers and len(self.headers) > self._limits.header_count:  # headers, or trailers after a chunked body
            self._refuse(self._too_many())

    def send_400_response(self, msg: str) -> None:
        """Answer a request that cannot be parsed, or whose parsing was stopped by a limit."""
        if self._refusal is None:
            super().send_400_response(msg)
        else:
            self._refuse(self._refusal)

    def _refuse(self, refusal: ConnectionRefusal) -> None:
        self._registry.refused(refusal.limit)
        logger.debug("%s: %s", self._address, refusal.text)
        if self.cycle is None or self.cycle.response_complete:  # else it would end up inside the answer under way
            self.transport.write(refusal.response())
        self.transport.close()

    def _stop(self, refusal: ConnectionRefusal) -> None:
        """Stop the parser from inside one of its callbacks; ``send_400_response`` then sends the refusal."""
        self._refusal = refusal
        raise _RefusedError

    def _too_large(self) -> ConnectionRefusal:
        limit = self._limits.header_bytes
        return ConnectionRefusal(431, f"headers: more than {limit} bytes (limits.max_header_bytes)", "max_header_bytes")

    def _too_many(self) -> ConnectionRefusal:
        return ConnectionRefusal(431, f"headers: more than {self._limits.header_count} of them", "max_header_bytes")

    # --- callbacks of the parser --------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if not self._receiving:  # for the first request, the time counts from the connection
            self._since = self.loop.time()
        self._receiving = self._in_head = self._began = self._progress = True
        self._head_bytes = self._unfinished_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._head_bytes += len(url)
        if self._head_bytes > self._limits.url_bytes:
            self._stop(ConnectionRefusal(414, f"URL: more than {self._limits.url_bytes} bytes", "max_header_bytes"))
        super().on_url(url)

    def on_headers_complete(self) -> None:
        self._head_bytes += sum([len(name) + len(value) + len(": \r\n") for name, value in self.headers])
        if self._head_bytes > self._limits.header_bytes:
            self._stop(self._too_large())
        if len(self.headers) > self._limits.header_count:
            self._stop(self._too_many())
        if len(self.pipeline) >= _MAX_PIPELINED:
            self._stop(ConnectionRefusal(429, f"pipelining: more than {_MAX_PIPELINED} requests", "pipelined_requests"))
        super().on_headers_complete()
        # httptools will append trailers, which follow a body, to this list. They are ignored: a key in a trailer must
        # not count. uvicorn would look for an upgrade in it, but upgrades are switched off (ws="none").
        self.headers = []
        self._in_head = False
        self._made_progress()
        self._registry.busy(self)

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._made_progress()
        if self.pipeline and len(self.cycle.body) > _MAX_PIPELINED_BODY:
            self._stop(ConnectionRefusal(429, "pipelining: a long body behind another request", "pipelined_requests"))

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._receiving = False
        self._made_progress()
        if self.cycle.response_complete:  # it was answered, with a refusal, before its body was complete
            self._registry.waiting(self, self._since)

    def on_response_complete(self) -> None:
        is_last = not self.pipeline and not self._receiving
        super().on_response_complete()
        if is_last:
            self._registry.waiting(self, self.loop.time())

    def _made_progress(self) -> None:
        self._progress = True
        self._unfinished_bytes = 0
        self._since = self.loop.time()

    # --- timeouts -----------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Close a connection whose client pauses too long: in a request, in reading an answer, or between requests."""
        now = self.loop.time()
        if self._is_unread(now):
            self._registry.refused("unread_answers")
            self.transport.abort()
        elif self._is_late(now) and not self.transport.is_closing():
            self._close_silent()
        self._clock = self.loop.call_later(self._limits.check_seconds, self._check)

    def _close_silent(self) -> None:
        if self._receiving and self._began:
            self._refuse(ConnectionRefusal(408, "the request did not come whole in time", "silent_connections"))
        else:  # an answer without a request would be taken for the answer to the next one
            self._registry.refused("silent_connections")
            self.transport.close()

    def _is_late(self, now: float) -> bool:
        """Return whether the rest of a request, or the next request, has not come in time."""
        if not self._receiving:
            # uvicorn cancels its own keep-alive timer when any data arrives, even if no request follows.
            is_idle = self.cycle.response_complete and not self.pipeline and self.timeout_keep_alive_task is None
            return is_idle and now - self._since > self.timeout_keep_alive
        if self._in_head:
            return now - self._since > self._limits.head_seconds
        if self.flow.read_paused or self.cycle.waiting_for_100_continue:  # the client is waiting for the server
            self._since = now
            return False
        return now - self._since > self._limits.progress_seconds

    def _is_unread(self, now: float) -> bool:
        """Return whether the client has read nothing of the waiting answer for too long."""
        unsent = self.transport.get_write_buffer_size()
        if unsent == 0 or unsent != self._unsent:
            self._unsent, self._unsent_since = unsent, now
            return False
        return now - self._unsent_since > self._limits.progress_seconds


def _network(address: str) -> str:
    """Return what counts as one address: an IPv4 address, or an IPv6 /64 network, which one customer has to itself."""
    if ":" not in address:
        return address
    try:
        parsed = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(parsed), 64), strict=False))


def _open_files() -> int:
    """Return how many files this process has open; an estimate where the system does not list them."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 64
