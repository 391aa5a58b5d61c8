"""The memory of one server process: how much results may take, and when new work is refused.

:class:`ResultMemory` counts a result from the moment it exists until it is gone, fetched or not. When there are too
many bytes, the tenant with most of them loses its oldest results from memory: first those that it has fetched, then
those that the journal can give back. A result that is being sent to a client stays until it is sent.

:class:`MemoryGuard` watches the whole process all the time, so that new work is refused before the kernel kills the
server. It counts what the kernel counts: the limit of the machine, or of any control group that the process is in, with
all of their processes. When little is left, caches go first; then new work is refused with 503. Heartbeats, results,
deletes, saves and optimizer steps go on: with them clients finish and memory becomes free.
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
    """One result in memory. ``drop`` makes its owner let go of it; it is called on the event loop."""

    tenant_id: str
    size: int
    drop: Callable[[], None]
    sending: int = 0  # how many answers are being written from it


@dataclass
class _Share:
    """The results of one tenant that may leave memory, the oldest first."""

    fetched: OrderedDict[int, HeldResult] = field(default_factory=OrderedDict)
    on_disk: OrderedDict[int, HeldResult] = field(default_factory=OrderedDict)  # and not fetched yet
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
        """Return the result that leaves first; those that are being sent stay."""
        results = chain(self.fetched.values(), self.on_disk.values())
        return next((result for result in results if not result.sending), None)


class ResultMemory:
    """Belongs to one event loop. ``limit`` in bytes."""

    def __init__(self, limit: int = 2**62) -> None:
        self.limit = limit
        self._bytes = Tally()  # by tenant
        self._sending = Tally()  # of these, in answers that are being written
        self._shares: dict[str, _Share] = {}

    @property
    def used(self) -> int:
        return self._bytes.total()

    @property
    def budget(self) -> Budget:
        return Budget("results", self.used, self.limit)

    def add(self, result: HeldResult) -> None:
        """Count a result, which cannot leave yet, and make room for it."""
        self._bytes[result.tenant_id] += result.size
        self.shrink_to(self.limit)

    def may_leave(self, result: HeldResult, *, fetched: bool) -> None:
        """Note that nothing is lost when the result leaves memory: it was fetched, or the journal has it."""
        self._shares.setdefault(result.tenant_id, _Share()).add(result, fetched=fetched)
        self.shrink_to(self.limit)

    def remove(self, result: HeldResult) -> None:
        """Stop counting a result that its owner has let go of."""
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
        """Raise if no more results can be taken: QuotaError for a tenant's own share, OverloadedError for all."""
        share, own = self.limit // 2, self._bytes[tenant_id]
        if own >= share and self._must_stay(tenant_id) >= share:
            raise QuotaError("bytes of results", own, share, _RESULTS_KEY)
        if self.used >= self.limit and sum(map(self._must_stay, list(self._bytes))) >= self.limit:
            raise OverloadedError("bytes of results", self.used, self.limit, _RESULTS_KEY)

    def reading(self, tenant_id: str, size: int) -> AbstractContextManager[None]:
        """Count ``size`` bytes that come back from disk to be sent; OverloadedError while too many are being sent.

        A tenant has half of the memory at most. It is told 503, not 429, which SDKs take for the end of a future.
        """
        for sending, limit in ((self._sending[tenant_id], self.limit // 2), (self._sending.total(), self.limit)):
            if sending and sending + size > limit:
                raise OverloadedError("bytes of results being sent", sending, limit, _RESULTS_KEY, retry_after=1)
        return self._sending.counting(tenant_id, size)

    def shrink_to(self, limit: int) -> int:
        """Let results go until ``limit`` bytes are left, or nothing may leave any more; return the bytes that left."""
        before = used = self.used
        if used <= limit:
            return 0
        # Tenants with most bytes first; one with nothing to give is not asked again.
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
        share = self._shares.get(tenant_id)
        return self._bytes[tenant_id] - (0 if share is None else share.bytes)


logger = logging.getLogger(__name__)

_RESERVE_KEY = "memory_reserve_bytes"
_RESERVE_SHARE = 0.05
_LEAST_RESERVE, _MOST_RESERVE = 256 * 2**20, 4 * 2**30
_RESULT_SHARE = 5  # a fifth
_QUEUE_SHARE = 5  # a fifth
_ADAPTER_SHARE = 4  # a quarter
_SECONDS = 0.5  # between two looks …
_SECONDS_WHEN_SHORT = 0.1  # … and when little is left
_RESERVES, _SKIPPED = 8, 3  # while so many times the reserve is free, so many looks are left out: each takes 1 ms
_TRIM_SECONDS = 10.0  # returning memory to the system takes some 100 ms of the interpreter


class MemoryGuard:
    """Belongs to one event loop; reading happens in a thread."""

    def __init__(self, reserve_bytes: int | None = None, read: Callable[[], HostMemory] = read_host_memory) -> None:
        """``reserve_bytes`` are to stay free; None: a twentieth of the limit, within bounds."""
        self._read = read
        self._memory = read()
        self._reserve = reserve_bytes
        self._expected = 0  # bytes of work that was let in since the last look
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
        """Return the bytes left above the reserve, work that was just let in taken off; negative when it is touched."""
        return self._memory.limit - self._memory.used - self._expected - self.reserve

    @property
    def is_short(self) -> bool:
        """Return whether caches should be dropped. Called in any thread."""
        return self.free < self.reserve

    @property
    def budget(self) -> Budget:
        return Budget("process_memory", self._memory.used, max(0, self._memory.limit - self.reserve))

    def relieve_with(self, drop: Callable[[], int]) -> None:
        """Have ``drop`` called on the event loop when memory is short; it returns how many bytes it let go."""
        self._reliefs.append(drop)

    def check(self, size: int = 0, *, urgent: bool = False) -> None:
        """Raise OverloadedError if work that takes about ``size`` bytes would touch the reserve.

        ``urgent``: other work waits for this and holds memory until it comes. It may take half of the reserve.
        """
        spare = self.reserve // 2 if urgent else 0
        if self.free + spare < size:
            budget = self.budget
            raise OverloadedError(
                "bytes of the server's memory", budget.used + self._expected, budget.limit, _RESERVE_KEY
            )
        self._expected += size

    async def watch(self) -> None:
        """Look at the memory again and again, until cancelled."""
        while True:
            try:
                await self._look()
            except Exception:  # an edge: a file of /proc that cannot be read must not end the watch
                logger.exception("the server's memory could not be read")
            await asyncio.sleep(_SECONDS_WHEN_SHORT if self.free < 2 * self.reserve else _SECONDS)
            for _ in range(_SKIPPED):
                if self.free >= _RESERVES * self.reserve:  # work that was let in meanwhile is taken off
                    await asyncio.sleep(_SECONDS)

    async def _look(self) -> None:
        self._memory = await asyncio.to_thread(self._read)
        self._expected = 0
        if self.is_short:
            dropped = sum(drop() for drop in self._reliefs)
            if time.monotonic() - self._trimmed_at > _TRIM_SECONDS:
                logger.warning(
                    "memory is short: %d of %d bytes are used; %d bytes of results left memory",
                    self._memory.used,
                    self._memory.limit,
                    dropped,
                )
                await asyncio.to_thread(_return_memory)
                self._trimmed_at = time.monotonic()
                self._memory = await asyncio.to_thread(self._read)


class ProcessMemory:
    """All budgets of one process, shared by its services."""

    def __init__(self, limits: LimitsConfig | None = None) -> None:
        limits = limits or LimitsConfig()
        whole = host_memory_limit()
        self.guard = MemoryGuard(limits.memory_reserve_bytes)
        self.results = ResultMemory(limits.max_result_bytes or whole // _RESULT_SHARE)
        self.queued_bytes = limits.max_queued_bytes or whole // _QUEUE_SHARE
        self.adapter_bytes = limits.max_host_adapter_bytes or whole // _ADAPTER_SHARE
        self.guard.relieve_with(lambda: self.results.shrink_to(self.results.limit // 8))


def _return_memory() -> None:
    """Give the system what is not in use any more: the C library keeps it otherwise."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):  # another C library than GNU's
        return
