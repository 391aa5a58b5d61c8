"""Thread pools for the work of requests: a pool for each kind of work, shared fairly between tenants.

Work of one kind never waits for work of another kind. Within a kind, a tenant has at most two threads at a time, never
all of them (except for monitoring, which is no tenant's work), and tenants take turns. The event loop's default thread
pool is for the server itself: writing snapshots, loading adapters from disk, maintenance, startup and shutdown.

:class:`TenantTurns` limits the number of a tenant's concurrent pieces of work where one piece spans several awaits.
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
    """The threads for one kind of work. Used from one event loop.

    A thread counts as its tenant's until its work has ended, even if the request that wanted the result was cancelled.
    So a client that disconnects and sends its request again does not get more threads.
    """

    def __init__(self, kind: str, threads: int, at_once: int) -> None:
        """``at_once``: the largest number of threads that one tenant may use at a time."""
        self._threads = threads
        self._at_once = at_once
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=kind)
        self._running = Tally()  # threads by tenant
        # Requests that wait for a thread, by tenant; the tenant whose turn is next comes first.
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._closed = False

    async def in_thread(self, tenant_id: str, work: Callable[[], T]) -> T:
        """Run ``work`` in a thread when it is this tenant's turn. Raise ShuttingDownError if the pool closes first."""
        await self._enter(tenant_id)
        loop = asyncio.get_running_loop()
        try:
            running = self._executor.submit(contextvars.copy_context().run, work)
        except RuntimeError:  # the interpreter is shutting down
            self._leave(tenant_id)
            raise ShuttingDownError from None
        running.add_done_callback(lambda _: _soon(loop, partial(self._leave, tenant_id)))
        return await asyncio.wrap_future(running)

    def close(self) -> None:
        """Refuse new work and work that waits for its turn. Running work is not interrupted."""
        self._closed = True
        for waiters in self._waiting.values():
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_exception(ShuttingDownError())
        self._waiting.clear()
        self._executor.shutdown(wait=False)

    @property
    def waiting(self) -> int:
        """Return how many pieces of work of all tenants wait for a thread."""
        return sum(map(len, self._waiting.values()))

    async def _enter(self, tenant_id: str) -> None:
        if self._closed:
            raise ShuttingDownError
        if self._has_room(tenant_id):  # no waiting tenant could use this thread: _leave would have given it one
            self._running[tenant_id] += 1
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant_id, deque()).append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._leave(tenant_id)  # the thread was granted at the same moment: give it to the next
            else:
                self._forget(tenant_id, waiter)
            raise

    def _has_room(self, tenant_id: str) -> bool:
        return self._running.total() < self._threads and self._running[tenant_id] < self._at_once

    def _leave(self, tenant_id: str) -> None:
        """Return a tenant's thread to the pool, and give free threads to waiting tenants in turn."""
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
    """The thread pools of a process for the work of requests, one for each kind of work."""

    def __init__(self) -> None:
        self.reading = FairPool("reading", threads=4, at_once=2)  # request bodies: JSON, protobuf, digests
        self.images = FairPool("images", threads=4, at_once=2)  # headers of images, and decoding them
        self.text = FairPool("text", threads=4, at_once=2)  # templates, tokenising, sampled text
        self.saving = FairPool("saving", threads=6, at_once=2)  # checkpoints: written, copied, deleted
        self.downloads = FairPool("downloads", threads=4, at_once=2)  # checkpoints: read in pieces
        # Uploads of checkpoints to a model hub, each of which may take a thread for minutes.
        self.hub = FairPool("hub", threads=4, at_once=2)
        self.monitoring = FairPool("monitoring", threads=2, at_once=2)  # /metrics and similar requests of no tenant

    def release_waiters(self) -> None:
        """Refuse new requests, and those that wait for a thread, because the server shuts down.

        The pools for saving and monitoring still take work.
        """
        for pool in (self.reading, self.images, self.text, self.downloads, self.hub):
            pool.close()


def _soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Schedule ``call`` on the event loop, from any thread."""
    with contextlib.suppress(RuntimeError):  # the loop is closed: no request waits for a turn any more
        loop.call_soon_threadsafe(call)


class TenantTurns:
    """A limit on concurrent pieces of work for each tenant: a tenant above it waits only for its own work.

    Used on one event loop.
    """

    def __init__(self, at_once: int = 2) -> None:
        self._at_once = at_once
        # Every piece of work that waits or runs holds a reference to its tenant's semaphore. Without any, the
        # semaphore is deleted.
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def turn(self, tenant_id: str) -> asyncio.Semaphore:
        """Return the semaphore to hold, with ``async with``, during a piece of the tenant's work."""
        return self._turns.setdefault(tenant_id, asyncio.Semaphore(self._at_once))
