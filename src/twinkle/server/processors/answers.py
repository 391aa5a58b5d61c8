"""Answers to requests that may be sent twice: the same key gets the same answer, and the work is done once."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from twinkle.errors import InvalidInputError, QuotaError, ShuttingDownError

__all__ = ["Answers"]

_KEPT = 64
_KEPT_BYTES = 16 * 2**20  # of one session, beside its last answer


@dataclass(frozen=True)
class _Entry:
    digest: bytes
    task: asyncio.Task[bytes]

    @property
    def size(self) -> int:
        """Bytes of the answer; of one that is not there yet, or an error, none."""
        done = self.task.done() and not self.task.cancelled() and self.task.exception() is None
        return len(self.task.result()) if done else 0


class Answers:
    """Of one session. Only the last ones are kept: whoever sends a request again does it soon."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    async def once(self, key: str | None, digest: bytes, work: Callable[[], Awaitable[bytes]]) -> bytes:
        """What ``work`` returns or raises, now or when this key was first used. ``digest`` is the request's.

        The work goes on when the client who waits for it leaves.
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
        except (QuotaError, ShuttingDownError):
            del self._entries[key]  # nothing was done, and the next time it may be
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
