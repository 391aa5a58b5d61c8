"""Tokens a minute, by tenant: a bucket that holds a minute's worth and fills up again all the time.

Whoever comes is charged before anything of theirs is done, so that many at once get no more than one after another. Of
a request whose cost is known only when it has ended, what it may cost at most is held back until then. One that costs
more than a whole minute's worth is let in when the bucket is full and leaves a debt behind: the rate holds over time.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from twinkle.errors import RateLimitError

__all__ = ["TokenRate"]

_MINUTE = 60.0


@dataclass
class _Bucket:
    level: float
    at: float  # when the level was this
    limit: int  # what it holds, and what fills it in a minute

    def refill(self, now: float) -> None:
        self.level = min(self.level + (now - self.at) * self.limit / _MINUTE, float(self.limit))
        self.at = now


class TokenRate:
    """``what`` names the limit in errors, ``key`` in the configuration. Belongs to one event loop."""

    def __init__(self, what: str, key: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._key = key
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}  # of tenants that have a limit

    def charge(self, tenant_id: str, tokens: int, limit: int | None) -> None:
        """Take ``tokens`` now, or raise RateLimitError, which says when to come again. ``limit`` None: no limit."""
        if limit is None:
            return
        bucket = self._bucket(tenant_id, limit)
        needed = min(tokens, limit)
        if bucket.level < needed:
            wait = (needed - bucket.level) * _MINUTE / limit
            raise RateLimitError(self._what, limit, math.ceil(wait), self._key)
        bucket.level -= tokens

    def give_back(self, tenant_id: str, tokens: int, limit: int | None) -> None:
        """What a request did not use after all; negative: what it used beyond its charge."""
        if limit is not None:
            bucket = self._bucket(tenant_id, limit)
            bucket.level = min(bucket.level + tokens, float(limit))

    def check(self, tenant_id: str, limit: int | None) -> None:
        """Raise RateLimitError if not even a token is left: for whoever has to work before the cost is known."""
        if limit is not None and self._bucket(tenant_id, limit).level < 1:
            self.charge(tenant_id, 1, limit)

    def forget_full(self) -> None:
        """Tenants whose bucket is as a new one would be. To be called now and then."""
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
