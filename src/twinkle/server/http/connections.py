"""What a connection may cost before anybody has shown a key: bytes of headers, silence, and open files.

uvicorn's own protocol bounds none of them. :class:`BoundedProtocol` adds the bounds to it, and :class:`Connections`
counts the connections of the whole process. Everything here runs on the event loop of the server.
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
# Files of our own that are opened while the server runs: the database, the journal, snapshots, checkpoints, processes.
_RESERVED_FILES = 512
# A waiting connection that is younger than this is not closed for the sake of a new one: its request is on the way.
_SETTLED_SECONDS = 1.0
# Nobody pipelines today; a few requests in a row are no attack.
_MAX_PIPELINED = 16
_MAX_PIPELINED_BODY = 2**20


@dataclass(frozen=True)
class ConnectionLimits:
    """Bounds for connections. ``total`` and ``backlog`` follow from the number of files that the process may open."""

    total: int = 60_000
    backlog: int = _MAX_BACKLOG
    per_address: int = 16_384
    header_bytes: int = 65_536  # request line and headers; likewise the trailers of a chunked body
    header_count: int = 256
    url_bytes: int = 16_384
    head_seconds: float = 20.0  # from the connection, or the first byte of a later request, to complete headers
    progress_seconds: float = 60.0  # the longest pause in a body, and in a client's reading of an answer
    check_seconds: float = 5.0  # how often a connection's clock is looked at


def connections_within_open_files(per_address: int, header_bytes: int) -> ConnectionLimits:
    """Return limits under which connections leave enough open files for the server's own.

    The kernel hands over a whole backlog of new connections before one that is refused is closed, so the backlog
    counts as open, too.
    """
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY:
        return ConnectionLimits(per_address=per_address, header_bytes=header_bytes)
    backlog = max(1, min(_MAX_BACKLOG, files // 8))
    total = files - _open_files() - min(_RESERVED_FILES, files // 4) - backlog
    return ConnectionLimits(total=max(1, total), backlog=backlog, per_address=per_address, header_bytes=header_bytes)


class Connections:
    """All connections of the process: how many there are, from where, and which of them have no request under way."""

    def __init__(self, limits: ConnectionLimits, refused: Callable[[str], None] = lambda limit: None) -> None:
        """``refused`` is told the name of each limit that a connection or request met."""
        self.limits = limits
        self.refused = refused
        self._open: set[BoundedProtocol] = set()
        self._by_address = Tally()
        # Connections without a request, and since when: the one that has waited longest comes first.
        self._waiting: OrderedDict[BoundedProtocol, float] = OrderedDict()

    def admit(self, connection: "BoundedProtocol", address: str, now: float) -> "Refusal | None":
        """Count a new connection, or return why there is no room for it.

        Where all places are taken, the connection that has been without a request for longest makes room.
        """
        limits = self.limits
        if self._by_address[address] >= limits.per_address:
            key = "max_connections_per_address"
            text = f"connections from one address: {limits.per_address} are open (limits.{key})"
            return Refusal(429, text, key)
        if len(self._open) >= limits.total and not self._evict(now):
            return Refusal(503, f"connections: {limits.total} are open, as many as open files allow", "open_files")
        self._open.add(connection)
        self._by_address[address] += 1
        self._waiting[connection] = now
        return None

    def lost(self, connection: "BoundedProtocol", address: str) -> None:
        """Forget a connection. One that was not admitted is no mistake."""
        if connection in self._open:
            self._open.discard(connection)
            self._waiting.pop(connection, None)
            self._by_address[address] -= 1

    def busy(self, connection: "BoundedProtocol") -> None:
        """Note that a request has come whole enough to be worked on."""
        self._waiting.pop(connection, None)

    def waiting(self, connection: "BoundedProtocol", now: float) -> None:
        """Note that the connection's requests are all answered."""
        if connection in self._open:
            self._waiting[connection] = now
            self._waiting.move_to_end(connection)

    def _evict(self, now: float) -> bool:
        for connection, since in self._waiting.items():
            if now - since < _SETTLED_SECONDS:
                return False
            del self._waiting[connection]
            self.refused("open_files")
            connection.transport.abort()
            return True
        return False


@dataclass(frozen=True)
class Refusal:
    """An answer that comes before any request was understood. ``limit``: what it met, for /metrics."""

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
    """Stops httptools in the middle of a piece of data."""


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits on what has no key yet.

    httptools joins the pieces of a header in memory and calls us when it is whole. So bytes are counted twice: as they
    arrive, where they are the next part of something unfinished, and as names and values, once the head is whole.
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
        self._refusal: Refusal | None = None
        self._clock: asyncio.TimerHandle | None = None
        # Of the request that is being received:
        self._receiving = True  # its end has not come; a new connection counts as the beginning of a request
        self._in_head = True
        self._began = False  # its first byte has come
        self._since = 0.0  # when its head began, or its body last grew
        self._head_bytes = 0  # names, values and the URL, as far as they are whole
        self._unfinished_bytes = 0  # that came without beginning or completing a head, and without growing a body
        self._progress = False  # whether the piece of data at hand did one of these
        # Of the answer that is being written:
        self._unsent = 0  # bytes that waited for the client to read, when the clock was last looked at
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
        if self.headers and len(self.headers) > self._limits.header_count:  # of the head or of trailers, so far
            self._refuse(self._too_many())

    def send_400_response(self, msg: str) -> None:
        """Answer what cannot be parsed, or was not parsed further because of a limit."""
        if self._refusal is None:
            super().send_400_response(msg)
        else:
            self._refuse(self._refusal)

    def _refuse(self, refusal: Refusal) -> None:
        self._registry.refused(refusal.limit)
        logger.debug("%s: %s", self._address, refusal.text)
        if self.cycle is None or self.cycle.response_complete:  # else it would be taken for the answer under way
            self.transport.write(refusal.response())
        self.transport.close()

    def _stop(self, refusal: Refusal) -> None:
        self._refusal = refusal
        raise _RefusedError

    def _too_large(self) -> Refusal:
        limit = self._limits.header_bytes
        return Refusal(431, f"headers: more than {limit} bytes (limits.max_header_bytes)", "max_header_bytes")

    def _too_many(self) -> Refusal:
        return Refusal(431, f"headers: more than {self._limits.header_count} of them", "max_header_bytes")

    # --- what httptools finds -----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if not self._receiving:  # the first request's time began with the connection
            self._since = self.loop.time()
        self._receiving = self._in_head = self._began = self._progress = True
        self._head_bytes = self._unfinished_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._head_bytes += len(url)
        if self._head_bytes > self._limits.url_bytes:
            self._stop(Refusal(414, f"URL: more than {self._limits.url_bytes} bytes", "max_header_bytes"))
        super().on_url(url)

    def on_headers_complete(self) -> None:
        self._head_bytes += sum([len(name) + len(value) + len(": \r\n") for name, value in self.headers])
        if self._head_bytes > self._limits.header_bytes:
            self._stop(self._too_large())
        if len(self.headers) > self._limits.header_count:
            self._stop(self._too_many())
        if len(self.pipeline) >= _MAX_PIPELINED:
            self._stop(Refusal(429, f"pipelining: more than {_MAX_PIPELINED} requests", "pipelined_requests"))
        super().on_headers_complete()
        # Trailers, which follow a body, are collected here and ignored: a key in a trailer must not count. uvicorn
        # would look for an upgrade here, and we have none (ws="none").
        self.headers = []
        self._in_head = False
        self._made_progress()
        self._registry.busy(self)

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._made_progress()
        if self.pipeline and len(self.cycle.body) > _MAX_PIPELINED_BODY:
            self._stop(Refusal(429, "pipelining: a long body behind another request", "pipelined_requests"))

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._receiving = False
        self._made_progress()
        if self.cycle.response_complete:  # it was refused before it had been read
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

    # --- the clock ----------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Close a connection whose client has been silent for too long in the middle of something."""
        now = self.loop.time()
        if self._is_unread(now):
            self._registry.refused("unread_answers")
            self.transport.abort()
        elif self._is_late(now) and not self.transport.is_closing():
            self._close_silent()
        self._clock = self.loop.call_later(self._limits.check_seconds, self._check)

    def _close_silent(self) -> None:
        if self._receiving and self._began:
            self._refuse(Refusal(408, "the request did not come whole in time", "silent_connections"))
        else:  # an answer to no request would be taken for that of the next one
            self._registry.refused("silent_connections")
            self.transport.close()

    def _is_late(self, now: float) -> bool:
        """Return whether the client has kept us waiting for the rest of its request, or for its next one."""
        if not self._receiving:
            # uvicorn forgets its own timer when anything arrives that is no request.
            is_idle = self.cycle.response_complete and not self.pipeline and self.timeout_keep_alive_task is None
            return is_idle and now - self._since > self.timeout_keep_alive
        if self._in_head:
            return now - self._since > self._limits.head_seconds
        if self.flow.read_paused or self.cycle.waiting_for_100_continue:  # it is we who are slow
            self._since = now
            return False
        return now - self._since > self._limits.progress_seconds

    def _is_unread(self, now: float) -> bool:
        """Return whether the client has kept us waiting to read our answer."""
        unsent = self.transport.get_write_buffer_size()
        if unsent == 0 or unsent != self._unsent:
            self._unsent, self._unsent_since = unsent, now
            return False
        return now - self._unsent_since > self._limits.progress_seconds


def _network(address: str) -> str:
    """Return what counts as one address: of IPv6 the network of 64 bits that a single customer has to itself."""
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
    """Return how many files this process has open; a guess where the system does not list them."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 64
