"""Threads for the work that requests cause: a pool for each kind of work, shared fairly between tenants.

Work of one kind never waits for work of another kind. Within a kind a tenant has a few threads at a time, never all of
them, and tenants take turns. The event loop's default threads are left to the server itself: snapshots, adapters that
come back from disk, start and end.

:class:`TenantTurns` limits how many pieces of a tenant's work are under way where a piece spans several awaits.
"""

import asyncio
import contextlib
import contextvars
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar
from weakref import WeakValueDictionary

from twinkle.errors import ShuttingDownError
from twinkle.server.types import Tally

T = TypeVar("T")


class FairPool:
    """Threads for one kind of work. Used from one event loop.

    A thread counts as its tenant's until its work has ended, also when nobody waits for the result any more: a client
    that hangs up and asks again gets no more threads by it.
    """

    def __init__(self, kind: str, threads: int, at_once: int) -> None:
        """``at_once``: the most threads that one tenant has at a time."""
        self._threads = threads
        self._at_once = at_once
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=kind)
        self._running = Tally()  # threads by tenant
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # the next tenant comes first
        self._closed = False

    async def in_thread(self, tenant_id: str, work: Callable[[], T]) -> T:
        """Run ``work`` in a thread once it is this tenant's turn. Raises ShuttingDownError if the pool closes first."""
        await self._enter(tenant_id)
        loop = asyncio.get_running_loop()
        try:
            running = self._executor.submit(contextvars.copy_context().run, work)
        except RuntimeError:  # the interpreter is ending
            self._leave(tenant_id)
            raise ShuttingDownError from None
        running.add_done_callback(lambda _: _soon(loop, partial(self._leave, tenant_id)))
        return await asyncio.wrap_future(running)

    def close(self) -> None:
        """Refuse new work and what waits for its turn. What runs is not interrupted."""
        self._closed = True
        for waiters in self._waiting.values():
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_exception(ShuttingDownError())
        self._waiting.clear()
        self._executor.shutdown(wait=False)

    @property
    def waiting(self) -> int:
        """Return how many pieces of work wait for a thread, of all tenants."""
        return sum(map(len, self._waiting.values()))

    async def _enter(self, tenant_id: str) -> None:
        if self._closed:
            raise ShuttingDownError
        if self._has_room(tenant_id):  # then nobody waits who could have this thread
            self._running[tenant_id] += 1
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant_id, deque()).append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._leave(tenant_id)  # the turn came at the same moment
            else:
                self._forget(tenant_id, waiter)
            raise

    def _has_room(self, tenant_id: str) -> bool:
        return self._running.total() < self._threads and self._running[tenant_id] < self._at_once

    def _leave(self, tenant_id: str) -> None:
        self._running[tenant_id] -= 1
        while (chosen := next(filter(self._has_room, self._waiting), None)) is not None:
            waiters = self._waiting[chosen]
            waiter = waiters.popleft()
            self._waiting.move_to_end(chosen)
            if not waiters:
                del self._waiting[chosen]
            if not waiter.done():
                self._running[chosen] += 1
                waiter.set_result(None)

    def _forget(self, tenant_id: str, waiter: "asyncio.Future[None]") -> None:
        waiters = self._waiting.get(tenant_id, deque())
        with contextlib.suppress(ValueError):
            waiters.remove(waiter)
        if not waiters:
            self._waiting.pop(tenant_id, None)


class WorkPools:
    """All pools of a process."""

    def __init__(self) -> None:
        self.reading = FairPool("reading", threads=4, at_once=2)  # request bodies: JSON, protobuf, digests
        self.text = FairPool("text", threads=4, at_once=2)  # templates, tokenising, sampled text
        self.saving = FairPool("saving", threads=6, at_once=2)  # checkpoints: written, copied, deleted
        self.downloads = FairPool("downloads", threads=4, at_once=2)  # checkpoints: read, piece by piece
        # Checkpoints on their way to a hub, which may keep a thread for minutes.
        self.hub = FairPool("hub", threads=4, at_once=2)
        self.monitoring = FairPool("monitoring", threads=2, at_once=2)  # /metrics and the like, of no tenant

    def release_waiters(self) -> None:
        """Refuse requests that wait for a thread: the server is about to end. Saves still run."""
        for pool in (self.reading, self.text, self.downloads, self.hub):
            pool.close()


def _soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Call it on the event loop, from any thread."""
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for a turn any more
        loop.call_soon_threadsafe(call)


class TenantTurns:
    """A few pieces of work at a time for each tenant: one that sends much waits for itself. Used on one event loop."""

    def __init__(self, at_once: int = 2) -> None:
        self._at_once = at_once
        # Whoever waits or works holds the semaphore: tenants that have nothing here are forgotten.
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def turn(self, tenant_id: str) -> asyncio.Semaphore:
        """Return what to enter with ``async with`` around a piece of the tenant's work."""
        return self._turns.setdefault(tenant_id, asyncio.Semaphore(self._at_once))
