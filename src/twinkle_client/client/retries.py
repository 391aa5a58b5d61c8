"""Decide whether and when a request is sent again. This module does no I/O: the transport asks it, and sleeps.

Only failures that may pass by themselves are retried: failed connections, missing answers, 408, 429, 502, 503, 504, and
507 (the server's disk is full and it stored nothing). A 429 with the code ``limit_reached`` does not pass by itself:
the tenant has as many adapters, sessions or processors as it may have. It is retried for ``wait_for_limits`` seconds,
by default not at all. Every request of the client may be sent twice: sequence numbers of verbs and idempotency keys
let the server recognise the requests that must not run twice.

A server that has never answered is probably not there, or its address is wrong: it is given up after
``connect_deadline`` seconds, also if it accepts connections. Any answer counts, also that of a proxy whose server is
starting: such a server is waited for.
"""

import math
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from twinkle_client.environment import DEFAULT_CONNECT_DEADLINE
from twinkle_client.errors import invalid

__all__ = ["Backoff", "RetryPolicy", "read_seconds", "retry_after_seconds"]

RETRIED_STATUSES = frozenset({408, 429, 502, 503, 504, 507})
_MOST_DOUBLINGS = 32  # far beyond any longest_wait; many more doublings would overflow a float


@dataclass(frozen=True)
class RetryPolicy:
    """How long a request is retried. ``deadline``: seconds from its first failure until it is given up; 0: no retry.

    ``wait_for_limits``: the same for requests that are refused because a limit is full. ``connect_deadline``: seconds
    from the first attempt for which a server that has never answered is tried; a shorter ``deadline`` counts instead.

    The wait doubles from ``first_wait`` to ``longest_wait``, and up to half of it is left out at random, so that
    clients that lost the same server do not all come back at the same moment.
    """

    deadline: float = 300.0
    wait_for_limits: float = 0.0
    first_wait: float = 0.25
    longest_wait: float = 10.0
    statuses: frozenset[int] = RETRIED_STATUSES
    connect_deadline: float = float(DEFAULT_CONNECT_DEADLINE)


class Backoff:
    """The sequence of waits between the attempts of one request."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._failures = 0
        self._first_failure = 0.0

    def next_wait(self, server_asked: float | None = None) -> float | None:
        """Return the seconds to wait after a failure; None to give up. ``server_asked``: the seconds of Retry-After."""
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
    """Return the seconds of the header Retry-After (a number or a date); None if it is missing or invalid."""
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


def read_seconds(given: float | None, name: str, text: str, variable: str) -> float:
    """Return the seconds of the argument ``name``, else those of the variable; InvalidRequestError for a wrong one."""
    said, value = (variable, text) if given is None else (name, given)
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise invalid(said, value, "seconds, 0 or more")
    return seconds
