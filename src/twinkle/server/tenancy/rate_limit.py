"""Rates: the limit on a tenant's tokens per minute, and how fast a total has grown lately.

:class:`TokenRate` is a token bucket for each tenant: it holds one minute's tokens and refills continuously. A request
is charged before it is computed, so that many requests at once get no more than the same requests one after another.
Where the cost is known only at the end, the highest possible cost (at most one minute's tokens) is charged first, and
the difference is refunded or charged at the end. A request that costs more than a whole minute's tokens is accepted
when the bucket is full; the level is then negative, and later requests wait until it has refilled. So the rate holds on
average.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from twinkle.errors import RateLimitError

_MINUTE = 60.0


@dataclass
class _Bucket:
    level: float
    at: float  # the time for which the level was computed
    limit: int  # its capacity, and the tokens that it gains per minute

    def refill(self, now: float) -> None:
        self.level = min(self.level + (now - self.at) * self.limit / _MINUTE, float(self.limit))
        self.at = now


class TokenRate:
    """The rate limit of all tenants on one kind of tokens. Belongs to one event loop.

    ``what`` is the limit's name in errors, ``key`` its key in the configuration.
    """

    def __init__(self, what: str, key: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._key = key
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}  # by tenant; a tenant without a limit has none

    def charge(self, tenant_id: str, tokens: int, limit: int | None) -> None:
        """Take ``tokens`` from the tenant's bucket, or raise RateLimitError, which says after how many seconds to
        retry. ``limit`` None: no limit.
        """
        if limit is None:
            return
        bucket = self._bucket(tenant_id, limit)
        needed = min(tokens, limit)
        if bucket.level < needed:
            wait = (needed - bucket.level) * _MINUTE / limit
            raise RateLimitError(self._what, limit, math.ceil(wait), self._key)
        bucket.level -= tokens

    def give_back(self, tenant_id: str, tokens: int, limit: int | None) -> None:
        """Refund tokens that a request was charged and did not use. A negative number charges more tokens."""
        if limit is not None:
            bucket = self._bucket(tenant_id, limit)
            bucket.level = min(bucket.level + tokens, float(limit))

    def check(self, tenant_id: str, limit: int | None) -> None:
        """Raise RateLimitError if less than one token is left; nothing is charged.

        Callers that must do work before they know the cost call this.
        """
        if limit is not None and self._bucket(tenant_id, limit).level < 1:
            self.charge(tenant_id, 1, limit)

    def forget_full(self) -> None:
        """Delete full buckets: a new bucket is full, too. Called by maintenance."""
        now = self._clock()
        for bucket in self._buckets.values():
            bucket.refill(now)
        self._buckets = {name: bucket for name, bucket in self._buckets.items() if bucket.level < bucket.limit}

    def _bucket(self, tenant_id: str, limit: int) -> _Bucket:
        now = self._clock()
        bucket = self._buckets.setdefault(tenant_id, _Bucket(float(limit), now, limit))
        bucket.limit = limit
        bucket.refill(now)
        return bucket


class RecentRate:
    """The growth of a running total over about the last minute. Each :meth:`record` adds a point to measure from."""

    def __init__(self, now: float) -> None:
        self._notes: deque[tuple[float, int]] = deque([(now, 0)])  # (time, total), oldest first

    def record(self, total: int, now: float) -> None:
        self._notes.append((now, total))
        while len(self._notes) > 1 and now - self._notes[1][0] >= _MINUTE:
            self._notes.popleft()

    def rate(self, total: int, now: float) -> float:
        """Return the growth per second, to the present ``total``, since about a minute ago or since the start."""
        at, before = self._notes[0]
        return round((total - before) / max(now - at, 1.0), 1)
