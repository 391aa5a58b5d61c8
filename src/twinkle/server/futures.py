"""Promises: an outcome is awaited in the process that computes it; nobody polls.

Outcomes stay readable after their first delivery, since an answer may get lost on its way. What has been delivered is
forgotten after a while; what nobody fetched stays longer.
"""

import asyncio
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from twinkle.server.types import Outcome

PROMISE_BYTES = 1024  # what a promise takes beside its outcome, in round figures: a million empty ones are not nothing


class Waiters:
    """Those who wait for one thing to happen. Belongs to one event loop."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    async def sleep(self, timeout: float) -> None:
        """Until it happens, for ``timeout`` seconds at most."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiting.add(waiter)
        timer = loop.call_later(timeout, _wake, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiting.discard(waiter)

    def wake(self) -> None:
        for waiter in self._waiting:
            _wake(waiter)


@dataclass
class _Promise:
    tenant_id: str
    digest: bytes
    outcome: Outcome | None = None
    settled_at: float | None = None
    delivered_at: float | None = None
    waiters: Waiters = field(default_factory=Waiters)


@dataclass
class Futures:
    """All promises of one service, by request id. Belongs to one event loop."""

    delivered_seconds: float = 600.0
    unfetched_seconds: float = 3600.0
    closed: bool = False
    polls: int = 0  # that wait now
    _promises: dict[str, _Promise] = field(default_factory=dict)
    _delivered: list[str] = field(default_factory=list)
    # Of all that have an outcome, the oldest first: sweeping looks at no others.
    _unfetched: OrderedDict[str, None] = field(default_factory=OrderedDict)
    _fetched: OrderedDict[str, None] = field(default_factory=OrderedDict)
    _unfetched_bytes: Counter[str] = field(default_factory=Counter)  # by tenant

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._promises

    def promise(self, request_id: str, tenant_id: str, digest: bytes = b"") -> None:
        """``digest`` of the request, for whoever has to know whether it comes again or another one under its id."""
        self._promises.setdefault(request_id, _Promise(tenant_id, digest))

    def digest(self, request_id: str) -> bytes | None:
        """None: there is no such promise."""
        promise = self._promises.get(request_id)
        return None if promise is None else promise.digest

    def delivered(self, request_id: str) -> bool:
        """Whether the outcome was fetched and is still kept."""
        return request_id in self._fetched

    def unfetched_bytes(self, tenant_id: str) -> int:
        """How much is kept for a tenant that it has not asked for yet."""
        return self._unfetched_bytes[tenant_id]

    @property
    def all_unfetched_bytes(self) -> int:
        return sum(self._unfetched_bytes.values())

    def settle(self, request_id: str, outcome: Outcome, now: float) -> None:
        promise = self._promises.get(request_id)
        if promise is not None and promise.outcome is None:
            promise.outcome = outcome
            promise.settled_at = now
            self._unfetched[request_id] = None
            self._unfetched_bytes[promise.tenant_id] += _size(outcome)
            promise.waiters.wake()

    def forget(self, request_id: str) -> None:
        promise = self._promises.pop(request_id, None)
        self._unfetched.pop(request_id, None)
        self._fetched.pop(request_id, None)
        if promise is not None and promise.outcome is not None and promise.delivered_at is None:
            self._unfetched_bytes[promise.tenant_id] -= _size(promise.outcome)
            promise.delivered_at = promise.settled_at  # whoever is just being woken must not count it again

    def acknowledge(self, request_id: str) -> None:
        """The client has the outcome and will not ask for it again."""
        promise = self._promises.get(request_id)
        if promise is not None and promise.outcome is not None:
            self.forget(request_id)

    async def wait(self, request_id: str, timeout: float, now: float) -> Outcome | None:
        """The outcome, or None when there is none yet after ``timeout`` seconds."""
        promise = self._promises[request_id]
        if promise.outcome is None and not self.closed:
            self.polls += 1
            try:
                await promise.waiters.sleep(timeout)
            finally:
                self.polls -= 1
        if promise.outcome is not None and promise.delivered_at is None:
            promise.delivered_at = now
            self._unfetched_bytes[promise.tenant_id] -= _size(promise.outcome)
            self._delivered.append(request_id)
            del self._unfetched[request_id]
            self._fetched[request_id] = None
        return promise.outcome

    def close(self) -> None:
        """Let everybody go who waits, now and from now on: the server is about to end."""
        self.closed = True
        for promise in self._promises.values():
            promise.waiters.wake()

    def take_delivered(self) -> list[str]:
        """Ids whose outcome was fetched for the first time since the last call."""
        delivered, self._delivered = self._delivered, []
        return delivered

    def sweep(self, now: float) -> None:
        """Forget what has been kept long enough, and tenants of whom nothing is."""
        for order in (self._unfetched, self._fetched):
            while order and self._is_old(self._promises[next(iter(order))], now):
                self.forget(next(iter(order)))
        self._unfetched_bytes = +self._unfetched_bytes

    def _is_old(self, promise: _Promise, now: float) -> bool:
        if promise.delivered_at is not None:
            return now - promise.delivered_at > self.delivered_seconds
        return promise.settled_at is not None and now - promise.settled_at > self.unfetched_seconds


def _size(outcome: Outcome) -> int:
    return len(outcome.body) + PROMISE_BYTES


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
