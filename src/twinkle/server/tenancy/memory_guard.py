"""The memory of one server process: watched all the time, so that new work is refused before the kernel ends us.

What counts is what the kernel counts: the limit of the machine, or of any control group that the process is in, with
all of their processes. When little is left, what we keep only for convenience goes first; then new work is refused with
503. Heartbeats, results, deletes, saves and optimizer steps go on: they are how clients finish and memory gets free.
"""

import asyncio
import ctypes
import gc
import logging
import time
from collections.abc import Callable

from twinkle.errors import OverloadedError
from twinkle.model.host_memory import HostMemory, host_memory_limit, read_host_memory
from twinkle.server.config.sections import LimitsConfig
from twinkle.server.tenancy.result_memory import ResultMemory
from twinkle.server.types import Budget

__all__ = ["MemoryGuard", "ProcessMemory"]

logger = logging.getLogger(__name__)

_KEY = "memory_reserve_bytes"
_RESERVE_SHARE = 0.05
_LEAST_RESERVE, _MOST_RESERVE = 256 * 2**20, 4 * 2**30
_RESULT_SHARE = 5  # a fifth
_QUEUE_SHARE = 5  # a fifth
_ADAPTER_SHARE = 4  # a quarter
_SECONDS = 0.5  # between two looks …
_SECONDS_WHEN_SHORT = 0.1  # … and when little is left
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
        """Whether what is kept for convenience had better go. In any thread."""
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
            raise OverloadedError("bytes of the server's memory", budget.used + self._expected, budget.limit, _KEY)
        self._expected += size

    async def watch(self) -> None:
        """Look at the memory again and again, until cancelled."""
        while True:
            try:
                await self._look()
            except Exception:  # an edge: a file of /proc that cannot be read must not end the watch
                logger.exception("the server's memory could not be read")
            await asyncio.sleep(_SECONDS_WHEN_SHORT if self.free < 2 * self.reserve else _SECONDS)

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
