"""Turns: a few pieces of a tenant's work at a time. A tenant that sends much waits for itself and holds up nobody else.

A turn may span several awaits. Work for threads goes through :mod:`twinkle.server.tenancy.work_pools`.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

__all__ = ["TenantTurns"]


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
