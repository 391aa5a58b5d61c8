"""When a request is sent again, and after how long. No input or output: the transport asks, and sleeps.

Only what may become better by itself is retried: connections that fail, answers that do not come, 408, 429, 502, 503,
504, and 507 (a full disk, on which nothing was kept). Every request of the client may be sent twice (numbers of
adapters' verbs and idempotency keys see to it).
"""

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

__all__ = ["Backoff", "RetryPolicy", "retry_after_seconds"]

RETRIED_STATUSES = frozenset({408, 429, 502, 503, 504, 507})
_MOST_DOUBLINGS = 32  # far beyond any longest wait; more of them would soon be too large for a float


@dataclass(frozen=True)
class RetryPolicy:
    """``deadline``: seconds from the first failure of a request until it is given up; 0 means no second try.

    The wait doubles from ``first_wait`` to ``longest_wait``, and a random half of it is left out: clients that lost one
    server must not all come back at once.
    """

    deadline: float = 300.0
    first_wait: float = 0.25
    longest_wait: float = 10.0


class Backoff:
    """The waits of one request."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._failures = 0
        self._first_failure = 0.0

    def next_wait(self, server_asked: float | None = None) -> float | None:
        """Seconds to wait after a failure; None: it is given up. ``server_asked`` is what Retry-After said."""
        now = time.monotonic()
        if not self._failures:
            self._first_failure = now
        wait = min(self._policy.first_wait * 2 ** min(self._failures, _MOST_DOUBLINGS), self._policy.longest_wait)
        self._failures += 1
        wait *= random.uniform(0.5, 1.0)
        if server_asked is not None:
            wait = max(wait, server_asked)
        left = self._first_failure + self._policy.deadline - now
        return wait if wait <= left else None

    @property
    def failures(self) -> int:
        return self._failures


def retry_after_seconds(headers: Mapping[str, str]) -> float | None:
    """What the header Retry-After says, as seconds or as a date; None without one that makes sense."""
    text = headers.get("retry-after", "").strip()
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(text).timestamp() - time.time()
        except ValueError:
            return None
    return max(0.0, seconds) if seconds < float("inf") else None
