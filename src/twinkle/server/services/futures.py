"""Futures: what clients wait for under a request id, in the process that computes the outcome.

A waiting request sleeps until its future is settled; nothing polls. Outcomes stay readable after their first delivery,
because an answer may get lost on its way. A delivered outcome is forgotten after a while, an unfetched one later. An
outcome counts as delivered when its last byte has been written to a client. When memory for results runs short,
outcomes leave it earlier: those that the journal has are read back from there when a client asks for them, and samples,
which are stored nowhere else, are forgotten once they were delivered.
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

PROMISE_BYTES = 1024  # memory of a promise without its outcome, in round figures: a million of them take a gigabyte


async def happens(event: asyncio.Event, timeout: float) -> None:
    """Return when the event is set, or after ``timeout`` seconds."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout):
            await event.wait()


@dataclass
class _Promise:
    tenant_id: str
    digest: bytes
    outcome: Outcome | None = None  # None: there is none yet, or it is only on disk
    size: int = 0  # bytes of the outcome and of this promise, once there is an outcome
    settled_at: float | None = None
    delivered_at: float | None = None
    on_disk: bool = False
    held: HeldResult | None = None  # set while the outcome is in memory
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while the outcome is read from disk
    ended: asyncio.Event = field(default_factory=asyncio.Event)  # set when it is settled, or when the server shuts down


@dataclass
class Delivery:
    """An answer that is being written to a client. Its writer sets ``complete`` after the last byte."""

    complete: bool = False


@dataclass
class Futures:
    """All futures of one service, by request id. Belongs to one event loop.

    ``read_back`` reads an outcome from disk by its request id; None: outcomes of this service are only in memory.
    """

    delivered_seconds: float = 600.0
    unfetched_seconds: float = 3600.0
    memory: ResultMemory = field(default_factory=ResultMemory)
    read_back: Callable[[str], Awaitable[Outcome | None]] | None = None
    closed: bool = False
    polls: int = 0  # requests that wait for an outcome now
    _promises: dict[str, _Promise] = field(default_factory=dict)
    _delivered: list[str] = field(default_factory=list)  # delivered since the last call of take_delivered
    # Request ids of all settled promises, the oldest first: ``sweep`` looks only at the first ones.
    _unfetched: OrderedDict[str, None] = field(default_factory=OrderedDict)
    _fetched: OrderedDict[str, None] = field(default_factory=OrderedDict)
    _unfetched_bytes: Tally = field(default_factory=Tally)  # by tenant

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._promises

    @event_loop
    def promise(self, request_id: str, tenant_id: str, digest: bytes = b"") -> None:
        """Add an unsettled future, if there is none with this id.

        ``digest`` of the request lets the caller tell a repeated request from another one under the same id.
        """
        self._promises.setdefault(request_id, _Promise(tenant_id, digest))

    def digest(self, request_id: str) -> bytes | None:
        """Return the digest of a request; None if there is no such future."""
        promise = self._promises.get(request_id)
        return None if promise is None else promise.digest

    def delivered(self, request_id: str) -> bool:
        """Return whether the outcome was fetched and is not forgotten yet."""
        return request_id in self._fetched

    def unfetched_bytes(self, tenant_id: str) -> int:
        """Return the bytes of results, in memory or on disk, that the tenant has not fetched yet."""
        return self._unfetched_bytes[tenant_id]

    def check_unfetched(self, tenant_id: str, limit: int) -> None:
        """Raise QuotaError if the tenant's unfetched results reach ``limit`` bytes or half of the memory for results,
        OverloadedError if those of all tenants together fill this memory.
        """
        self.memory.check(tenant_id)
        unfetched = self._unfetched_bytes[tenant_id]
        if unfetched >= limit:
            raise QuotaError("bytes of results not fetched", unfetched, limit, "max_unfetched_result_bytes")

    @property
    def all_unfetched_bytes(self) -> int:
        return self._unfetched_bytes.total()

    @event_loop
    def settle(self, request_id: str, outcome: Outcome, now: float) -> None:
        """Give a future its outcome and wake the requests that wait for it. Without effect if the future is unknown or
        settled already.
        """
        promise = self._promises.get(request_id)
        if promise is not None and promise.settled_at is None:
            promise.size = _size(outcome)
            promise.settled_at = now
            self._unfetched[request_id] = None
            self._unfetched_bytes[promise.tenant_id] += promise.size
            self._hold(request_id, promise, outcome)
            promise.ended.set()

    def recorded(self, request_id: str) -> None:
        """Note that the outcome is in the journal, so that it may leave memory. Without effect if there is no
        ``read_back``.
        """
        promise = self._promises.get(request_id)
        if promise is not None and self.read_back is not None:
            promise.on_disk = True
            if promise.held is not None:
                self.memory.may_leave(promise.held, fetched=promise.delivered_at is not None)

    @event_loop
    def adopt(self, request_id: str, tenant_id: str, outcome: Outcome, now: float) -> None:
        """Add a settled future with an outcome that was read from the journal, if there is no future with this id: for
        example because it was promised before a restart.
        """
        if request_id not in self._promises:
            self.promise(request_id, tenant_id)
            self._promises[request_id].on_disk = True
            self.settle(request_id, outcome, now)

    def forget(self, request_id: str) -> None:
        """Remove a future, settled or not."""
        promise = self._promises.pop(request_id, None)
        self._unfetched.pop(request_id, None)
        self._fetched.pop(request_id, None)
        if promise is None:
            return
        self._let_go(promise)
        if promise.settled_at is not None and promise.delivered_at is None:
            self._unfetched_bytes[promise.tenant_id] -= promise.size
            promise.delivered_at = promise.settled_at  # an answer still being written must not subtract its size again

    def acknowledge(self, request_id: str) -> None:
        """Remove a settled future, because its client has the outcome and will not ask for it again."""
        promise = self._promises.get(request_id)
        if promise is not None and promise.settled_at is not None:
            self.forget(request_id)

    async def wait(self, request_id: str, timeout: float) -> Outcome | None:
        """Return the outcome, or None if there is none after ``timeout`` seconds or when the server shuts down.

        KeyError: there is no future with this id. The outcome counts as delivered only after a complete
        :meth:`delivering`.
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
        """Keep the outcome in memory while it is written to a client; count it as delivered if that was completed."""
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
        """End all waiting, now and from now on, because the server shuts down."""
        self.closed = True
        for promise in self._promises.values():
            promise.ended.set()

    def take_delivered(self) -> list[str]:
        """Return the request ids whose outcome was delivered for the first time since the last call."""
        delivered, self._delivered = self._delivered, []
        return delivered

    def sweep(self, now: float) -> None:
        """Forget delivered and unfetched outcomes that have been kept long enough."""
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
        """Keep an outcome in memory, and count its bytes there."""
        promise.outcome = outcome
        promise.held = HeldResult(promise.tenant_id, promise.size, lambda: self._leave_memory(request_id, promise))
        self.memory.add(promise.held)
        if promise.on_disk:
            self.memory.may_leave(promise.held, fetched=promise.delivered_at is not None)

    def _leave_memory(self, request_id: str, promise: _Promise) -> None:
        """Free an outcome's memory. An outcome that is not on disk is lost, so its future is removed, too."""
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
