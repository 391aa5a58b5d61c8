"""Sessions that fell silent: at a limit they make room for those that are in use.

SDKs send a heartbeat every ten seconds and hardly ever end a session: a script that is done just stops. Its session
stays active until ``session_timeout_seconds``, half an hour by default, so that a client that lost its network finds
its adapters. Only when the tenant itself needs the place, a session that was silent for ``silent_session_seconds``
gives it up earlier: its adapters are parked, one at a time, until there is room.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakValueDictionary

from twinkle.errors import QuotaError
from twinkle.server.types import RunRecord, SessionRecord

if TYPE_CHECKING:
    from twinkle.server.gateway.gateway import Gateway

logger = logging.getLogger(__name__)

T = TypeVar("T")

_NAMED = 5  # sessions that an error names
_HOW_TO_END = "end one with POST /api/v1/sessions/SESSION_ID/finish (ServiceClient.close() does that)"


class SilentSessions:
    """Of one gateway. Belongs to one event loop."""

    def __init__(self, gateway: "Gateway") -> None:
        self._gateway = gateway
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # one makes room at a time

    @property
    def _seconds(self) -> float:
        return self._gateway.config.limits.silent_session_seconds

    def is_silent(self, session: SessionRecord, now: float) -> bool:
        """Return whether an active session was not heard of for a while. Times of heartbeats may be 15 s old."""
        return session.state == "active" and now - self._gateway.last_seen(session) > self._seconds

    async def with_adapter_room(self, run: RunRecord, create: Callable[[], Awaitable[T]]) -> T:
        """Return what ``create`` does; at the tenant's limit of adapters, after adapters of silent sessions left."""
        return await self._with_room(
            run.tenant_id,
            "max_adapters_per_tenant",
            create,
            lambda: self._park_one(run.tenant_id, run.session_id),
            lambda: self._adapters_full(run.tenant_id),
        )

    async def with_session_room(self, tenant_id: str, create: Callable[[], Awaitable[T]]) -> T:
        """Return what ``create`` does; at the tenant's limit of active sessions, after silent ones were ended."""
        return await self._with_room(
            tenant_id,
            "max_sessions_per_tenant",
            create,
            lambda: self._end_one(tenant_id),
            lambda: self._sessions_full(tenant_id),
        )

    async def _with_room(
        self,
        tenant_id: str,
        key: str,
        create: Callable[[], Awaitable[T]],
        make_room: Callable[[], Awaitable[bool]],
        full: Callable[[], Awaitable[QuotaError]],
    ) -> T:
        """``make_room`` frees one place and returns False if it cannot."""
        try:
            return await create()
        except QuotaError as error:
            if error.key != key:
                raise
        # Requests of one tenant that come together make room one after another: each parks only what it needs.
        lock = self._turns.setdefault(tenant_id, asyncio.Lock())
        async with lock:
            while True:
                try:
                    return await create()
                except QuotaError as error:
                    if error.key != key:
                        raise
                if not await make_room():
                    raise await full()

    # --- adapters -----------------------------------------------------------------------------------------------------

    async def _park_one(self, tenant_id: str, own_session: str) -> bool:
        """Park the adapter of the session that was silent for longest; sessions that have work waiting keep theirs."""
        silent = [each for each in await self._silent(tenant_id) if each.session_id != own_session]
        if not silent:
            return False
        runs = await self._gateway.store.runs.live_of_tenant(tenant_id)
        oldest_allowed = time.time() - self._seconds
        busy = await self._busy_sessions()
        for session in silent:
            own = [run for run in runs if run.session_id == session.session_id]
            if session.session_id in busy or any(self._last_request(run) >= oldest_allowed for run in own):
                continue  # a client that sends requests and no heartbeats is not silent
            for run in own:
                why = f"session {session.session_id} fell silent, and its tenant needed the place"
                logger.info("%s is parked: %s", run.run_id, why)
                await self._gateway.park_anywhere(run, why)
                if await self._has_left(run):
                    return True
        return False

    def _last_request(self, run: RunRecord) -> float:
        return max([run.last_request_at, *self._gateway.requests_of(run.run_id)])

    async def _has_left(self, run: RunRecord) -> bool:
        record = await self._gateway.store.runs.get(run.run_id)
        return record is None or record.state != "live"

    async def _adapters_full(self, tenant_id: str) -> QuotaError:
        runs = await self._gateway.store.runs.live_of_tenant(tenant_id)
        holders = Counter(run.session_id for run in runs)
        held = _named(f"{session_id} ({count})" for session_id, count in holders.most_common())
        limit = self._gateway.tenants.limits(tenant_id).max_adapters_per_tenant
        advice = f"they are held by sessions {held}, none of which is idle and silent for {self._seconds:g} s"
        return QuotaError("adapters", limit, limit, "max_adapters_per_tenant", f"{advice}; {_HOW_TO_END}")

    # --- sessions -----------------------------------------------------------------------------------------------------

    async def _end_one(self, tenant_id: str) -> bool:
        silent = await self._silent(tenant_id)
        busy = await self._busy_sessions() if silent else frozenset()
        for session in silent:
            if session.session_id not in busy:
                logger.info("session %s expired early: its tenant needed the place", session.session_id)
                await self._gateway.end_session(session, "expired")
                return True
        return False

    async def _sessions_full(self, tenant_id: str) -> QuotaError:
        page = await self._gateway.store.sessions.list(tenant_id, 50)
        newest = _named(session.session_id for session in page.items if session.state == "active")
        limit = self._gateway.tenants.limits(tenant_id).max_sessions_per_tenant
        advice = f"none of them is idle and silent for {self._seconds:g} s; the newest are {newest}"
        return QuotaError("active sessions", limit, limit, "max_sessions_per_tenant", f"{advice}; {_HOW_TO_END}")

    # --- both ---------------------------------------------------------------------------------------------------------

    async def _silent(self, tenant_id: str) -> list[SessionRecord]:
        """Return the tenant's active sessions that are silent, longest first; none if we did not listen all along."""
        if not self._gateway.running_time.ran_for(self._seconds):
            return []
        await self._gateway.flush_heartbeats()
        return list(await self._gateway.store.sessions.silent_of(tenant_id, time.time() - self._seconds))

    async def _busy_sessions(self) -> frozenset[str]:
        reports = await self._gateway.fleet_of_all.reports()
        return frozenset().union(*(report.busy_sessions for report in reports.values()))


def _named(names: Iterable[str]) -> str:
    """The first few of them."""
    listed = list(names)
    rest = len(listed) - _NAMED
    return ", ".join(listed[:_NAMED]) + (f" and {rest} others" if rest > 0 else "")
