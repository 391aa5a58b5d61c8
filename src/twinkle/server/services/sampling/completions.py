"""Completion streams: a client hears in one long poll which of its samples are done, instead of one poll for each.

A client of a sampling session has a stream: the original one has number 0, copies in other processes have others, and
the number is in the sequence numbers that a client uses. Places in a stream only grow, also from one server to the next
on the same data: a client that outlived a server goes on where it was.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count, islice

from twinkle.server.ids import RequestId
from twinkle.server.services.futures import happens

_MOST_AT_ONCE = 512  # a millisecond or two to write down


@dataclass(frozen=True)
class Completion:
    """``size`` of the result in bytes; None for a failure, and for a request that got lost."""

    place: int
    request_id: str
    number: int  # the request's
    size: int | None
    at: float


@dataclass
class _Stream:
    used_at: float
    entries: deque[Completion] = field(default_factory=deque)  # of which it is not certain that the client knows
    news: asyncio.Event = field(default_factory=asyncio.Event)  # something was added, or nobody is to wait any more
    polls: int = 0  # that wait here now
    passing: bool = False  # it is removed with the last poll that waits at it, unless something was added


class Completions:
    """The streams of one service. Belongs to one event loop."""

    def __init__(self, kept_seconds: float = 3600.0) -> None:
        self._streams: dict[tuple[str, int], _Stream] = {}
        self._places = count(time.time_ns() // 1000)  # no server completes a million requests a second
        self._kept_seconds = kept_seconds
        self._closed = False
        self.polls = 0  # that wait now

    def add(self, request_id: str, size: int | None, now: float) -> None:
        request = RequestId.parse(request_id)
        stream = self._stream(*request.client, now)
        stream.passing = False
        stream.entries.append(Completion(next(self._places), request_id, request.number, size, now))
        stream.news.set()

    def has_stream(self, sampling_session_id: str, client: int) -> bool:
        return (sampling_session_id, client) in self._streams

    def open_stream(self, sampling_session_id: str, client: int, now: float, *, passing: bool = False) -> None:
        """Open a stream. ``passing``: of a client of which nothing is known, since any number can be asked for."""
        self._stream(sampling_session_id, client, now).passing = passing

    def close_passing(self, sampling_session_id: str, client: int) -> None:
        """Forget a passing stream at which no poll waits any more and to which nothing was added."""
        stream = self._streams.get((sampling_session_id, client))
        if stream is not None and stream.passing and not stream.polls:
            del self._streams[sampling_session_id, client]

    async def after(
        self, sampling_session_id: str, client: int, place: int, timeout: float, now: float
    ) -> Sequence[Completion]:
        """Return what came after ``place``, within ``timeout`` seconds. The client knows what came before."""
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
        """Return the sequence numbers of samples of which it is not certain that the client knows."""
        stream = self._streams.get((sampling_session_id, client))
        return [] if stream is None else [entry.number for entry in stream.entries]

    def close(self) -> None:
        """Answer all polls, now and from now on."""
        self._closed = True
        for stream in self._streams.values():
            stream.news.set()

    def sweep(self, now: float, delivered: Callable[[str], bool]) -> None:
        """Forget what is too old, and results that their client fetched without asking here."""
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
