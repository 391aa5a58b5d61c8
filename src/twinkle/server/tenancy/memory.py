"""The memory of one server process: how much results may take, and when new work is refused.

:class:`ResultMemory` counts a result from the moment it exists until it leaves memory, fetched or not. When results
exceed their limit, the tenant with the most bytes loses its oldest results from memory: first those that its clients
have fetched, then those that can be read back from the journal. A result that is being sent to a client stays until it
is sent.

:class:`MemoryGuard` watches the memory of the whole process, so that new work is refused before the kernel kills the
server. It counts what the kernel counts: the memory of the machine, or of any control group that the process is in,
used by all processes there. When little is left, caches are dropped first; then new work is refused with 503.
Heartbeats, results, deletes, saves and optimizer steps are still accepted, because they let clients finish, which frees
memory.
"""

import asyncio
import ctypes
import gc
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import chain

from twinkle.errors import OverloadedError, QuotaError
from twinkle.model.trainer.host_memory import HostMemory, host_memory_limit, read_host_memory
from twinkle.server.config.sections import LimitsConfig
from twinkle.server.types import Budget, Tally

_RESULTS_KEY = "max_result_bytes"


@dataclass(eq=False)
class HeldResult:
    """One result in memory. ``drop`` makes its owner release the bytes; it is called on the event loop."""

    tenant_id: str
    size: int
    drop: Callable[[], None]
    sending: int = 0  # number of HTTP answers that are being written from it


@dataclass
class _Share:
    """The results of one tenant that may be dropped from memory, the oldest first."""

    fetched: OrderedDict[int, HeldResult] = field(default_factory=OrderedDict)
    on_disk: OrderedDict[int, HeldResult] = field(default_factory=OrderedDict)  # in the journal, not fetched yet
    bytes: int = 0

    def add(self, result: HeldResult, *, fetched: bool) -> None:
        self.remove(result)
        (self.fetched if fetched else self.on_disk)[id(result)] = result
        self.bytes += result.size

    def remove(self, result: HeldResult) -> None:
        for results in (self.fetched, self.on_disk):
            if results.pop(id(result), None) is not None:
                self.bytes -= result.size

    def first(self) -> HeldResult | None:
        """Return the result to drop next, or None. Results that are being sent are skipped."""
        results = chain(self.fetched.values(), self.on_disk.values())
        return next((result for result in results if not result.sending), None)


class ResultMemory:
    """Counts the bytes of all results in memory, by tenant, and drops some when they exceed ``limit`` bytes in all.

    Belongs to one event loop.
    """

    def __init__(self, limit: int = 2**62) -> None:
        self.limit = limit
        self._bytes = Tally()  # by tenant
        self._sending = Tally()  # the part of these bytes in answers that are being written, by tenant
        self._shares: dict[str, _Share] = {}

    @property
    def used(self) -> int:
        return self._bytes.total()

    @property
    def budget(self) -> Budget:
        return Budget("results", self.used, self.limit)

    def add(self, result: HeldResult) -> None:
        """Count a new result, which may not be dropped yet, and drop others to make room for it."""
        self._bytes[result.tenant_id] += result.size
        self.shrink_to(self.limit)

    def may_leave(self, result: HeldResult, *, fetched: bool) -> None:
        """Allow a result to be dropped: nothing is lost then, because it was fetched or the journal has it."""
        self._shares.setdefault(result.tenant_id, _Share()).add(result, fetched=fetched)
        self.shrink_to(self.limit)

    def remove(self, result: HeldResult) -> None:
        """Stop counting a result that its owner has released."""
        self._bytes[result.tenant_id] -= result.size
        share = self._shares.get(result.tenant_id)
        if share is not None:
            share.remove(result)
            if not share.bytes:
                del self._shares[result.tenant_id]

    def begin_sending(self, result: HeldResult) -> None:
        if not result.sending:
            self._sending[result.tenant_id] += result.size
        result.sending += 1

    def end_sending(self, result: HeldResult) -> None:
        result.sending -= 1
        if not result.sending:
            self._sending[result.tenant_id] -= result.size
        self.shrink_to(self.limit)

    def check(self, tenant_id: str) -> None:
        """Raise an error if results that may not be dropped leave no room for more.

        QuotaError: those of this tenant take half of the limit. OverloadedError: those of all tenants take all of it.
        """
        share, own = self.limit // 2, self._bytes[tenant_id]
        if own >= share and self._must_stay(tenant_id) >= share:
            raise QuotaError("bytes of results", own, share, _RESULTS_KEY)
        if self.used >= self.limit and sum(map(self._must_stay, list(self._bytes))) >= self.limit:
            raise OverloadedError("bytes of results", self.used, self.limit, _RESULTS_KEY)

    def reading(self, tenant_id: str, size: int) -> AbstractContextManager[None]:
        """Return a context manager for reading a result of ``size`` bytes from disk in order to send it.

        The bytes count as being sent while it is entered. Raise OverloadedError if together with those being sent
        already they exceed half of the limit for this tenant, or the limit for all tenants. A result alone is always
        allowed. The tenant's own limit is also an OverloadedError (503) and not a QuotaError (429), because SDKs take a
        429 as the final answer of a future.
        """
        for sending, limit in ((self._sending[tenant_id], self.limit // 2), (self._sending.total(), self.limit)):
            if sending and sending + size > limit:
                raise OverloadedError("bytes of results being sent", sending, limit, _RESULTS_KEY, retry_after=1)
        return self._sending.counting(tenant_id, size)

    def shrink_to(self, limit: int) -> int:
        """Drop results until at most ``limit`` bytes are left, or none may be dropped; return the bytes dropped."""
        before = used = self.used
        if used <= limit:
            return 0
        # The tenant with the most bytes loses a result first; a tenant without any that may be dropped is left out.
        candidates = {tenant_id: self._bytes[tenant_id] for tenant_id in self._shares}
        while used > limit and candidates:
            tenant_id = max(candidates, key=candidates.__getitem__)
            share = self._shares.get(tenant_id)
            result = None if share is None else share.first()
            if result is None:
                del candidates[tenant_id]
                continue
            result.drop()
            candidates[tenant_id] -= result.size
            used -= result.size
        return before - used

    def _must_stay(self, tenant_id: str) -> int:
        """Return the bytes of the tenant's results that may not be dropped."""
        share = self._shares.get(tenant_id)
        return self._bytes[tenant_id] - (0 if share is None else share.bytes)


logger = logging.getLogger(__name__)

_RESERVE_KEY = "memory_reserve_bytes"
_RESERVE_SHARE = 0.05  # of the memory limit
_LEAST_RESERVE, _MOST_RESERVE = 256 * 2**20, 4 * 2**30
# The default limits are the memory of the machine, or of a control group that has less, divided by these.
_RESULT_SHARE = 5
_QUEUE_SHARE = 5
_ADAPTER_SHARE = 4
_SECONDS = 0.5  # between two readings of the memory in use …
_SECONDS_WHEN_SHORT = 0.1  # … and between two readings when little is left
_RESERVES, _SKIPPED = 8, 3  # while 8 times the reserve and 4 GiB are free, 3 of 4 readings are skipped
_TRIM_SECONDS = 10.0  # between two trims: returning memory to the system blocks the interpreter for some 100 ms


class MemoryGuard:
    """Refuses new work, and has caches dropped, when the memory that the process may use runs short.

    Belongs to one event loop; the memory is read in another thread.
    """

    def __init__(self, reserve_bytes: int | None = None, read: Callable[[], HostMemory] = read_host_memory) -> None:
        """``reserve_bytes``: how much must stay free.

        None: a twentieth of the memory, at least 256 MiB, at most 4 GiB, and at most a quarter of the memory.
        """
        self._read = read
        self._memory = read()
        self._reserve = reserve_bytes
        self._expected = 0  # bytes that work accepted since the last reading will take
        self._reliefs: list[Callable[[], int]] = []
        self._trimmed_at = 0.0

    @property
    def reserve(self) -> int:
        if self._reserve is not None:
            return self._reserve
        share = int(self._memory.limit * _RESERVE_SHARE)
        return min(max(share, _LEAST_RESERVE), _MOST_RESERVE, self._memory.limit // 4)

    @property
    def free(self) -> int:
        """Return the free bytes above the reserve, less those that just accepted work will take.

        The number is negative when a part of the reserve is in use.
        """
        return self._memory.limit - self._memory.used - self._expected - self.reserve

    @property
    def is_short(self) -> bool:
        """Return whether less than twice the reserve is free: caches should be dropped. May be called in any thread."""
        return self.free < self.reserve

    @property
    def budget(self) -> Budget:
        return Budget("process_memory", self._memory.used, max(0, self._memory.limit - self.reserve))

    def relieve_with(self, drop: Callable[[], int]) -> None:
        """Register ``drop``, to be called on the event loop when memory is short. It returns the bytes it dropped."""
        self._reliefs.append(drop)

    def check(self, size: int = 0, *, urgent: bool = False) -> None:
        """Raise OverloadedError if work that takes about ``size`` bytes would use a part of the reserve.

        Otherwise the bytes count as used until the memory is read again. ``urgent``: other ops wait for this one and
        hold memory until it runs. It may use half of the reserve.
        """
        spare = self.reserve // 2 if urgent else 0
        if self.free + spare < size:
            budget = self.budget
            raise OverloadedError(
                "bytes of the server's memory", budget.used + self._expected, budget.limit, _RESERVE_KEY
            )
        self._expected += size

    async def watch(self) -> None:
        """Read the memory in use periodically, and have caches dropped when it is short, until cancelled."""
        while True:
            try:
                await self._look()
            except Exception:  # an edge: a file of /proc that cannot be read must not end the watch
                logger.exception("the server's memory could not be read")
            await asyncio.sleep(_SECONDS_WHEN_SHORT if self.free < 2 * self.reserve else _SECONDS)
            for _ in range(_SKIPPED):
                # ``free`` also falls with work accepted since the reading.
                if self.free >= max(_RESERVES * self.reserve, _MOST_RESERVE):
                    await asyncio.sleep(_SECONDS)

    async def _look(self) -> None:
        self._memory = await asyncio.to_thread(self._read)
        self._expected = 0
        if self.is_short:
            dropped = sum(drop() for drop in self._reliefs)
            if time.monotonic() - self._trimmed_at > _TRIM_SECONDS:
                logger.warning(
                    "memory is short: %d of %d bytes are in use; dropped %d bytes of results",
                    self._memory.used,
                    self._memory.limit,
                    dropped,
                )
                await asyncio.to_thread(_return_memory)
                self._trimmed_at = time.monotonic()
                self._memory = await asyncio.to_thread(self._read)


class ProcessMemory:
    """The memory guard and the limits in bytes (results, queues, adapters) of one process, shared by its services."""

    def __init__(self, limits: LimitsConfig | None = None) -> None:
        limits = limits or LimitsConfig()
        whole = host_memory_limit()
        self.guard = MemoryGuard(limits.memory_reserve_bytes)
        self.results = ResultMemory(limits.max_result_bytes or whole // _RESULT_SHARE)
        self.queued_bytes = limits.max_queued_bytes or whole // _QUEUE_SHARE
        self.adapter_bytes = limits.max_host_adapter_bytes or whole // _ADAPTER_SHARE
        self.guard.relieve_with(lambda: self.results.shrink_to(self.results.limit // 8))


def _return_memory() -> None:
    """Return freed memory to the operating system; otherwise the C library keeps it for later use."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):  # the C library is not GNU's and has no malloc_trim
        return
