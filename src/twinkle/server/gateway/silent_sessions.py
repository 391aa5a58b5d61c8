"""Silent sessions: when a tenant reaches a limit, they make room for the sessions that it uses.

SDKs send a heartbeat every ten seconds and hardly ever end a session: a script that is done just stops. Its session
stays active for ``session_timeout_seconds``, half an hour by default, so that a client that lost its network still
finds its adapters. It may end earlier when its own tenant is at a limit: then sessions that have been silent for
``silent_session_seconds`` lose their adapters or are ended, one at a time, until the tenant's new request fits.
"""

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Literal, Protocol, TypeVar

from twinkle.errors import LimitReachedError, QuotaError
from twinkle.server.config import ServerConfig
from twinkle.server.gateway.fleet import Fleet
from twinkle.server.gateway.running_time import RunningTime
from twinkle.server.state.errors import ReplicaHeldError
from twinkle.server.state.store import Store
from twinkle.server.tenancy.tenants import Tenants
from twinkle.server.tenancy.work_pools import TenantTurns
from twinkle.server.types import RunRecord, SessionRecord

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ADAPTERS = "max_adapters_per_tenant"
_SESSIONS = "max_sessions_per_tenant"
_NAMED = 5  # the most sessions that an error names
_FINISH = "POST /api/v1/sessions/SESSION_ID/finish (ServiceClient.close() and TwinkleClient.close() do that)"
_HOW_TO_END = f"end one with {_FINISH}"
_HOW_TO_REMOVE = f"remove an adapter with model.remove_adapter(name), end a session with {_FINISH}"


class Host(Protocol):
    """The part of the gateway that :class:`SilentSessions` uses."""

    @property
    def config(self) -> ServerConfig: ...

    @property
    def store(self) -> Store: ...

    @property
    def tenants(self) -> Tenants: ...

    @property
    def running_time(self) -> RunningTime: ...

    @property
    def fleet_of_all(self) -> Fleet: ...

    def last_seen(self, session: SessionRecord) -> float: ...

    def last_request(self, run: RunRecord) -> float: ...

    async def with_row_room(self, tenant_id: str, create: Callable[[], Awaitable[T]]) -> T: ...

    async def evict_anywhere(self, run: RunRecord, why: str) -> None: ...

    async def end_session(self, session: SessionRecord, state: Literal["finished", "expired"]) -> None: ...

    async def flush_heartbeats(self) -> None: ...


class SilentSessions:
    """Ends a tenant's silent sessions, or evicts their adapters, when the tenant is at a limit.

    Belongs to the gateway's event loop.
    """

    def __init__(self, gateway: Host) -> None:
        self._gateway = gateway
        self._turns = TenantTurns(at_once=1)

    @property
    def _seconds(self) -> float:
        return self._gateway.config.limits.silent_session_seconds

    def is_silent(self, session: SessionRecord) -> bool:
        """Return whether an active session has sent no heartbeat for ``limits.silent_session_seconds``.

        Heartbeats at other processes count once these have written them to the database, by default every 15 s.
        """
        return session.state == "active" and time.time() - self._gateway.last_seen(session) > self._seconds

    async def with_room(self, tenant_id: str, create: Callable[[], Awaitable[T]], own_session: str = "") -> T:
        """Call ``create`` and return its result.

        If the tenant is at its limit of sessions or adapters, evict adapters or end sessions that are silent until
        ``create`` succeeds; QuotaError if that is not enough. If another run of the tenant holds the replica, and its
        session is silent, evict that run; ReplicaHeldError for any other holder. ``own_session``: the session that
        ``create`` is for, whose adapters are not evicted.
        """
        try:
            return await self._gateway.with_row_room(tenant_id, create)
        except QuotaError as error:
            if error.key not in (_ADAPTERS, _SESSIONS):
                raise
        except ReplicaHeldError as error:
            if error.holder.tenant_id != tenant_id:
                raise
        # Concurrent requests of one tenant take turns, so that each evicts only what it needs itself.
        async with self._turns.turn(tenant_id):
            while True:
                try:
                    return await self._gateway.with_row_room(tenant_id, create)
                except QuotaError as error:
                    if error.key == _ADAPTERS:
                        await self._evict_one(tenant_id, own_session)
                    elif error.key == _SESSIONS:
                        await self._end_one(tenant_id)
                    else:
                        raise
                except ReplicaHeldError as error:
                    if error.holder.tenant_id != tenant_id or not await self._evict_holder(error.holder, own_session):
                        raise

    async def _evict_holder(self, holder: RunRecord, own_session: str) -> bool:
        """Evict a run that holds a replica, if its session is silent and idle; return whether it was evicted."""
        silent = await self._silent(holder.tenant_id, own_session)
        if not any(session.session_id == holder.session_id for session in silent):
            return False
        return await self._evict_silent(holder)

    async def _evict_one(self, tenant_id: str, own_session: str) -> None:
        """Evict one adapter of a silent session that has no unfinished ops and no recent requests.

        The session that has been silent for longest comes first. QuotaError if none could be evicted; it names
        the sessions that hold the tenant's adapters.
        """
        silent = await self._silent(tenant_id, own_session)
        runs = await self._gateway.store.runs.live_of_tenant(tenant_id)
        oldest_allowed = time.time() - self._seconds
        for session in silent:
            own = [run for run in runs if run.session_id == session.session_id]
            if any(self._gateway.last_request(run) >= oldest_allowed for run in own):
                continue  # a client that sends requests and no heartbeats is not silent
            for run in own:
                if await self._evict_silent(run):
                    return
        runs = await self._gateway.store.runs.live_of_tenant(tenant_id)
        holders = Counter(run.session_id for run in runs)
        held = _named(f"{session_id} ({count})" for session_id, count in holders.most_common())
        limit = self._gateway.tenants.limits(tenant_id).max_adapters_per_tenant
        advice = f"they are held by sessions {held}, none of which is idle and silent for {self._seconds:g} s"
        raise LimitReachedError("adapters", limit, limit, _ADAPTERS, f"{advice}; {_HOW_TO_REMOVE}")

    async def _evict_silent(self, run: RunRecord) -> bool:
        """Evict a run of a silent session, unless it had requests lately; return whether it is not live any more."""
        if self._gateway.last_request(run) >= time.time() - self._seconds:
            return False  # a client that sends requests and no heartbeats is not silent
        why = f"session {run.session_id} fell silent, and its tenant needed the place"
        logger.info("%s is evicted: %s", run.run_id, why)
        await self._gateway.evict_anywhere(run, why)
        record = await self._gateway.store.runs.get(run.run_id)
        return record is None or record.state != "live"

    async def _end_one(self, tenant_id: str) -> None:
        """End the session without unfinished ops that has been silent for longest.

        QuotaError, which names the newest sessions, if there is none.
        """
        silent = await self._silent(tenant_id)
        if silent:
            logger.info("session %s expired early: its tenant needed the place", silent[0].session_id)
            await self._gateway.end_session(silent[0], "expired")
            return
        page = await self._gateway.store.sessions.list(tenant_id, 50)
        newest = _named(session.session_id for session in page.items if session.state == "active")
        limit = self._gateway.tenants.limits(tenant_id).max_sessions_per_tenant
        advice = f"none of them is idle and silent for {self._seconds:g} s; the newest are {newest}"
        raise LimitReachedError("active sessions", limit, limit, _SESSIONS, f"{advice}; {_HOW_TO_END}")

    async def _silent(self, tenant_id: str, except_session: str = "") -> list[SessionRecord]:
        """Return the tenant's silent sessions that have no unfinished ops, the longest silent one first.

        ``except_session`` is left out. The list is empty if this process has not run for long enough without a
        break to judge silence.
        """
        if not self._gateway.running_time.ran_for(self._seconds):
            return []
        await self._gateway.flush_heartbeats()
        silent = await self._gateway.store.sessions.silent_of(tenant_id, time.time() - self._seconds)
        others = [session for session in silent if session.session_id != except_session]
        reports = (await self._gateway.fleet_of_all.reports()).values() if others else ()
        busy = frozenset[str]().union(*(report.busy_sessions for report in reports))
        return [session for session in others if session.session_id not in busy]


def _named(names: Iterable[str]) -> str:
    """Return the first five names as text, with the number of the others."""
    listed = list(names)
    rest = len(listed) - _NAMED
    return ", ".join(listed[:_NAMED]) + (f" and {rest} others" if rest > 0 else "")
