"""Work in threads, a few pieces of a tenant's at a time: whoever sends much waits for itself, not before others.

All share the interpreter's pool of threads, which takes what comes first.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

__all__ = ["TenantTurns"]

T = TypeVar("T")


@dataclass
class _Line:
    turns: asyncio.Semaphore
    length: int = 0  # how many wait or work


class TenantTurns:
    """Belongs to one event loop."""

    def __init__(self, at_once: int = 2) -> None:
        self._at_once = at_once
        self._lines: dict[str, _Line] = {}  # of tenants that have something here

    @asynccontextmanager
    async def turn(self, tenant_id: str) -> AsyncIterator[None]:
        line = self._lines.setdefault(tenant_id, _Line(asyncio.Semaphore(self._at_once)))
        line.length += 1
        try:
            async with line.turns:
                yield
        finally:
            line.length -= 1
            if not line.length:
                del self._lines[tenant_id]

    async def in_thread(self, tenant_id: str, work: Callable[[], T]) -> T:
        async with self.turn(tenant_id):
            return await asyncio.to_thread(work)
