"""Promises: an outcome is awaited in the process that computes it; nobody polls.

Outcomes stay readable after their first delivery, since an answer may get lost on its way. What has been delivered is
forgotten after a while; what nobody fetched stays longer. An outcome counts as delivered once it has been written to a
client to the last byte. When memory for results runs short, outcomes leave it earlier: those that the journal has are
read back when somebody asks, and samples, which are nowhere else, are forgotten once they were delivered.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from twinkle.errors import QuotaError
from twinkle.server.backends.compute_thread import event_loop
from twinkle.server.tenancy.memory import HeldResult, ResultMemory
from twinkle.server.types import Outcome, Tally

PROMISE_BYTES = 1024  # what a promise takes beside its outcome, in round figures: a million empty ones are not nothing


async def happens(event: asyncio.Event, timeout: float) -> None:
    """Return when the event is set, after ``timeout`` seconds at the latest."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout):
            await event.wait()


@dataclass
class _Promise:
    tenant_id: str
    digest: bytes
    outcome: Outcome | None = None  # None: there is none yet, or it is on disk
    size: int = 0  # of the outcome, once there is one
    settled_at: float | None = None
    delivered_at: float | None = None
    on_disk: bool = False
    held: HeldResult | None = None  # while the outcome is in memory
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while the outcome comes from disk
    ended: asyncio.Event = field(default_factory=asyncio.Event)  # it is settled, or nobody is to wait any more


@dataclass
class Delivery:
    """An answer that is being written to a client. ``complete`` once the client was given the last byte."""

    complete: bool = False


@dataclass
class Futures:
    """All promises of one service, by request id. Belongs to one event loop.

    ``read_back`` fetches an outcome from disk by its request id; None: outcomes of this service are only in memory.
    """

    delivered_seconds: float = 600.0
    unfetched_seconds: float = 3600.0
    memory: ResultMemory = field(default_factory=ResultMemory)
    read_back: Callable[[str], Awaitable[Outcome | None]] | None = None
    closed: bool = False
    polls: int = 0  # that wait now
    _promises: dict[str, _Promise] = field(default_factory=dict)
    _delivered: list[str] = field(default_factory=list)
    # Of all that have an outcome, the oldest first: sweeping looks at no others.
    _unfetched: OrderedDict[str, None] = field(default_factory=OrderedDict)
    _fetched: OrderedDict[str, None] = field(default_factory=OrderedDict)
    _unfetched_bytes: Tally = field(default_factory=Tally)  # by tenant

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._promises

    @event_loop
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
        """How much is kept for a tenant, in memory or on disk, that it has not fetched yet."""
        return self._unfetched_bytes[tenant_id]

    def check_unfetched(self, tenant_id: str, limit: int) -> None:
        """Raise QuotaError if the tenant has too many results to fetch, OverloadedError if all tenants together do."""
        self.memory.check(tenant_id)
        unfetched = self._unfetched_bytes[tenant_id]
        if unfetched >= limit:
            raise QuotaError("bytes of results not fetched", unfetched, limit, "max_unfetched_result_bytes")

    @property
    def all_unfetched_bytes(self) -> int:
        return self._unfetched_bytes.total()

    @event_loop
    def settle(self, request_id: str, outcome: Outcome, now: float) -> None:
        promise = self._promises.get(request_id)
        if promise is not None and promise.settled_at is None:
            promise.size = _size(outcome)
            promise.settled_at = now
            self._unfetched[request_id] = None
            self._unfetched_bytes[promise.tenant_id] += promise.size
            self._hold(request_id, promise, outcome)
            promise.ended.set()

    def recorded(self, request_id: str) -> None:
        """Note that the outcome is on disk: it may leave memory."""
        promise = self._promises.get(request_id)
        if promise is not None and self.read_back is not None:
            promise.on_disk = True
            if promise.held is not None:
                self.memory.may_leave(promise.held, fetched=promise.delivered_at is not None)

    @event_loop
    def adopt(self, request_id: str, tenant_id: str, outcome: Outcome, now: float) -> None:
        """Take over an outcome that was read from disk, of a request that was promised before a restart."""
        if request_id not in self._promises:
            self.promise(request_id, tenant_id)
            self._promises[request_id].on_disk = True
            self.settle(request_id, outcome, now)

    def forget(self, request_id: str) -> None:
        promise = self._promises.pop(request_id, None)
        self._unfetched.pop(request_id, None)
        self._fetched.pop(request_id, None)
        if promise is None:
            return
        self._let_go(promise)
        if promise.settled_at is not None and promise.delivered_at is None:
            self._unfetched_bytes[promise.tenant_id] -= promise.size
            promise.delivered_at = promise.settled_at  # an answer that is just being written must not count it again

    def acknowledge(self, request_id: str) -> None:
        """The client has the outcome and will not ask for it again."""
        promise = self._promises.get(request_id)
        if promise is not None and promise.settled_at is not None:
            self.forget(request_id)

    async def wait(self, request_id: str, timeout: float) -> Outcome | None:
        """Return the outcome, or None when there is none yet after ``timeout`` seconds.

        It counts as delivered only once :meth:`delivering` has ended well.
        """
        promise = self._promises[request_id]
        if promise.settled_at is None and not self.closed:
            self.polls += 1
            try:
                await happens(promise.ended, timeout)
            finally:
                self.polls -= 1
        if promise.settled_at is None or promise.outcome is not None:
            return promise.outcome
        return await self._from_disk(request_id, promise)

    @contextmanager
    def delivering(self, request_id: str, now: float) -> Iterator[Delivery]:
        """Keep the outcome in memory while it is written to a client; note its delivery if that is complete."""
        promise, delivery = self._promises.get(request_id), Delivery()
        held = None if promise is None else promise.held
        if held is not None:
            self.memory.begin_sending(held)
        try:
            yield delivery
        finally:
            if held is not None:
                self.memory.end_sending(held)
            if promise is not None and delivery.complete:
                self._note_delivery(request_id, promise, now)

    def close(self) -> None:
        """Let everybody go who waits, now and from now on: the server is about to end."""
        self.closed = True
        for promise in self._promises.values():
            promise.ended.set()

    def take_delivered(self) -> list[str]:
        """Ids whose outcome was fetched for the first time since the last call."""
        delivered, self._delivered = self._delivered, []
        return delivered

    def sweep(self, now: float) -> None:
        """Forget what has been kept long enough."""
        for order in (self._unfetched, self._fetched):
            while order and self._is_old(self._promises[next(iter(order))], now):
                self.forget(next(iter(order)))

    def _note_delivery(self, request_id: str, promise: _Promise, now: float) -> None:
        if promise.delivered_at is not None:
            return
        promise.delivered_at = now
        self._unfetched_bytes[promise.tenant_id] -= promise.size
        self._delivered.append(request_id)
        del self._unfetched[request_id]
        self._fetched[request_id] = None
        if promise.held is not None and (promise.on_disk or self.read_back is None):
            self.memory.may_leave(promise.held, fetched=True)

    def _hold(self, request_id: str, promise: _Promise, outcome: Outcome) -> None:
        """Keep an outcome in memory, and count it there."""
        promise.outcome = outcome
        promise.held = HeldResult(promise.tenant_id, promise.size, lambda: self._leave_memory(request_id, promise))
        self.memory.add(promise.held)
        if promise.on_disk:
            self.memory.may_leave(promise.held, fetched=promise.delivered_at is not None)

    def _leave_memory(self, request_id: str, promise: _Promise) -> None:
        if promise.on_disk:
            self._let_go(promise)
        else:
            self.forget(request_id)

    def _let_go(self, promise: _Promise) -> None:
        promise.outcome = None
        if promise.held is not None:
            self.memory.remove(promise.held)
            promise.held = None

    async def _from_disk(self, request_id: str, promise: _Promise) -> Outcome | None:
        async with promise.reading:
            if promise.outcome is None and promise.on_disk and self.read_back is not None:
                with self.memory.reading(promise.tenant_id, promise.size):
                    outcome = await self.read_back(request_id)
                if outcome is not None and self._promises.get(request_id) is promise:
                    self._hold(request_id, promise, outcome)
                return outcome
        return promise.outcome

    def _is_old(self, promise: _Promise, now: float) -> bool:
        if promise.delivered_at is not None:
            return now - promise.delivered_at > self.delivered_seconds
        return promise.settled_at is not None and now - promise.settled_at > self.unfetched_seconds


def _size(outcome: Outcome) -> int:
    return len(outcome.body) + PROMISE_BYTES
