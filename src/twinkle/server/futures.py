"""Promises: an outcome is awaited in the process that computes it; nobody polls.

Outcomes stay readable after their first delivery, since an answer may get lost on its way. What has been delivered is
forgotten after a while; what nobody fetched stays longer.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from twinkle.server.types import Outcome


@dataclass
class _Promise:
    tenant_id: str
    outcome: Outcome | None = None
    settled_at: float | None = None
    delivered_at: float | None = None
    waiters: set[asyncio.Future[None]] = field(default_factory=set)

    def wake(self) -> None:
        for waiter in self.waiters:
            _wake(waiter)


@dataclass
class Futures:
    """All promises of one service, by request id. Belongs to one event loop."""

    delivered_seconds: float = 600.0
    unfetched_seconds: float = 3600.0
    closed: bool = False
    _promises: dict[str, _Promise] = field(default_factory=dict)
    _delivered: list[str] = field(default_factory=list)
    _unfetched_bytes: Counter[str] = field(default_factory=Counter)  # by tenant

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._promises

    def promise(self, request_id: str, tenant_id: str) -> None:
        self._promises.setdefault(request_id, _Promise(tenant_id))

    def unfetched_bytes(self, tenant_id: str) -> int:
        """How much is kept for a tenant that it has not asked for yet."""
        return self._unfetched_bytes[tenant_id]

    def settle(self, request_id: str, outcome: Outcome, now: float) -> None:
        promise = self._promises.get(request_id)
        if promise is not None and promise.outcome is None:
            promise.outcome = outcome
            promise.settled_at = now
            self._unfetched_bytes[promise.tenant_id] += len(outcome.body)
            promise.wake()

    def forget(self, request_id: str) -> None:
        promise = self._promises.pop(request_id, None)
        if promise is not None and promise.outcome is not None and promise.delivered_at is None:
            self._unfetched_bytes[promise.tenant_id] -= len(promise.outcome.body)

    async def wait(self, request_id: str, timeout: float, now: float) -> Outcome | None:
        """The outcome, or None when there is none yet after ``timeout`` seconds."""
        promise = self._promises[request_id]
        if promise.outcome is None and not self.closed:
            await self._sleep(promise, timeout)
        if promise.outcome is not None and promise.delivered_at is None:
            promise.delivered_at = now
            self._unfetched_bytes[promise.tenant_id] -= len(promise.outcome.body)
            self._delivered.append(request_id)
        return promise.outcome

    async def _sleep(self, promise: _Promise, timeout: float) -> None:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        promise.waiters.add(waiter)
        timer = loop.call_later(timeout, _wake, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            promise.waiters.discard(waiter)

    def close(self) -> None:
        """Let everybody go who waits, now and from now on: the server is about to end."""
        self.closed = True
        for promise in self._promises.values():
            promise.wake()

    def take_delivered(self) -> list[str]:
        """Ids whose outcome was fetched for the first time since the last call."""
        delivered, self._delivered = self._delivered, []
        return delivered

    def sweep(self, now: float) -> None:
        """Forget what has been kept long enough."""
        for request_id in [key for key, promise in self._promises.items() if self._is_old(promise, now)]:
            self.forget(request_id)

    def _is_old(self, promise: _Promise, now: float) -> bool:
        if promise.delivered_at is not None:
            return now - promise.delivered_at > self.delivered_seconds
        return promise.settled_at is not None and now - promise.settled_at > self.unfetched_seconds


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
