"""Completion streams: a client learns in one long poll which of its samples are done, instead of one poll for each.

Each client of a sampling session has its own stream. The original client has number 0, copies of it in other processes
have higher numbers; a client's number follows from the sequence numbers that it uses. Places in a stream only grow.
They begin at the time of the start in microseconds, so they are higher after a restart of the server than before, and
a client that outlives the restart continues where it was.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count, islice

from twinkle.server.ids import RequestId
from twinkle.server.services.futures import happens

_MOST_AT_ONCE = 512  # completions in one answer, which takes a millisecond or two to encode


@dataclass(frozen=True)
class Completion:
    """One sample that is done. ``size``: bytes of the result; None for one that failed, was cancelled or was lost."""

    place: int
    request_id: str
    number: int  # the request's sequence number
    size: int | None
    at: float


@dataclass
class _Stream:
    used_at: float
    entries: deque[Completion] = field(default_factory=deque)  # those that the client has not confirmed yet
    news: asyncio.Event = field(default_factory=asyncio.Event)  # set when an entry is added, or at shutdown
    polls: int = 0  # long polls that wait for this stream now
    passing: bool = False  # temporary: removed after the last poll that waits for it, unless an entry was added


class Completions:
    """The completion streams of one sampling service: which samples of a client are done. Belongs to one event loop."""

    def __init__(self, kept_seconds: float = 3600.0) -> None:
        self._streams: dict[tuple[str, int], _Stream] = {}
        self._places = count(time.time_ns() // 1000)  # no server completes a million requests a second
        self._kept_seconds = kept_seconds
        self._closed = False
        self.polls = 0  # long polls that wait now

    def add(self, request_id: str, size: int | None, now: float) -> None:
        """Add a sample that is done to its client's stream."""
        request = RequestId.parse(request_id)
        stream = self._stream(*request.client, now)
        stream.passing = False
        stream.entries.append(Completion(next(self._places), request_id, request.number, size, now))
        stream.news.set()

    def has_stream(self, sampling_session_id: str, client: int) -> bool:
        return (sampling_session_id, client) in self._streams

    def open_stream(self, sampling_session_id: str, client: int, now: float, *, passing: bool = False) -> None:
        """Open a stream. ``passing``: it is temporary, because the server knows nothing of this client: a poll may name
        any client number, and such polls must not fill the memory with streams.
        """
        self._stream(sampling_session_id, client, now).passing = passing

    def close_passing(self, sampling_session_id: str, client: int) -> None:
        """Remove a temporary stream, if no poll waits for it any more and nothing was added to it."""
        stream = self._streams.get((sampling_session_id, client))
        if stream is not None and stream.passing and not stream.polls:
            del self._streams[sampling_session_id, client]

    async def after(
        self, sampling_session_id: str, client: int, place: int, timeout: float, now: float
    ) -> Sequence[Completion]:
        """Return up to 512 completions after ``place``, the oldest first; wait up to ``timeout`` seconds for the first.

        By asking for ``place`` the client confirms all entries up to and including it, which are forgotten.
        """
        stream = self._stream(sampling_session_id, client, now)
        _trim(stream, place)
        if not stream.entries and not self._closed:
            stream.news.clear()
            self.polls += 1
            stream.polls += 1
            try:
                await happens(stream.news, timeout)
            finally:
                self.polls -= 1
                stream.polls -= 1
            _trim(stream, place)
        return list(islice(stream.entries, _MOST_AT_ONCE))

    def numbers(self, sampling_session_id: str, client: int) -> Sequence[int]:
        """Return the sequence numbers of completions that the client has not confirmed yet."""
        stream = self._streams.get((sampling_session_id, client))
        return [] if stream is None else [entry.number for entry in stream.entries]

    def close(self) -> None:
        """Answer all polls at once, now and from now on, because the server shuts down."""
        self._closed = True
        for stream in self._streams.values():
            stream.news.set()

    def sweep(self, now: float, delivered: Callable[[str], bool]) -> None:
        """Forget the oldest entries of each stream, as long as they are too old or their result was ``delivered`` in
        another way, and empty streams that were not used for long.
        """
        oldest = now - self._kept_seconds
        for stream in self._streams.values():
            entries = stream.entries
            while entries and (entries[0].at < oldest or delivered(entries[0].request_id)):
                entries.popleft()
        self._streams = {
            key: stream for key, stream in self._streams.items() if stream.used_at >= oldest or stream.entries
        }

    def _stream(self, sampling_session_id: str, client: int, now: float) -> _Stream:
        stream = self._streams.setdefault((sampling_session_id, client), _Stream(now))
        stream.used_at = now
        return stream


def _trim(stream: _Stream, place: int) -> None:
    while stream.entries and stream.entries[0].place <= place:
        stream.entries.popleft()
