"""What each tenant has used: tokens, optimizer steps, requests. Counted where an op or a sample ends well.

Counts are kept twice. The totals since the process started are for whoever watches this server; what was not written
down yet goes to the database now and then (see ``state.records.usage``), by day, and stays there. A kill
loses what came since the last time, which is seconds.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import add

FORGOTTEN = ""  # no tenant's id: all of whom nothing was heard for long, together
_REMEMBERED = 10_000  # tenants: where any key is one, there is no end of them


@dataclass(frozen=True)
class UsageCounts:
    """``trained_tokens``: of forward and forward_backward. ``prompt_tokens``: of samples, once for all of a request.

    ``requests``: ops and samples.
    """

    trained_tokens: int = 0
    sampled_tokens: int = 0
    prompt_tokens: int = 0
    optim_steps: int = 0
    requests: int = 0

    def __add__(self, other: "UsageCounts") -> "UsageCounts":
        return UsageCounts(*map(add, vars(self).values(), vars(other).values()))  # both have their fields in order


_NOTHING = UsageCounts()


class Usage:
    """The counters of one process. Belongs to one event loop."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._totals: OrderedDict[str, UsageCounts] = OrderedDict()  # longest not heard of first
        self._forgotten = _NOTHING
        self._unwritten: dict[tuple[str, str], UsageCounts] = {}  # by tenant and day

    def add(self, tenant_id: str, counts: UsageCounts) -> None:
        self._totals[tenant_id] = self._totals.get(tenant_id, _NOTHING) + counts
        self._totals.move_to_end(tenant_id)
        while len(self._totals) > _REMEMBERED:
            self._forgotten += self._totals.popitem(last=False)[1]
        self._add_unwritten((tenant_id, utc_day(self._clock())), counts)

    def totals(self) -> Mapping[str, UsageCounts]:
        """By tenant, since the process started; of the many whom it does not remember one by one, the sum."""
        return {**self._totals, FORGOTTEN: self._forgotten} if self._forgotten != _NOTHING else dict(self._totals)

    def take_unwritten(self) -> Mapping[tuple[str, str], UsageCounts]:
        """By tenant and day, what came since the last call. Whoever cannot write it down puts it back."""
        taken, self._unwritten = self._unwritten, {}
        return taken

    def restore_unwritten(self, counts: Mapping[tuple[str, str], UsageCounts]) -> None:
        for key, each in counts.items():
            self._add_unwritten(key, each)

    def _add_unwritten(self, key: tuple[str, str], counts: UsageCounts) -> None:
        self._unwritten[key] = self._unwritten.get(key, _NOTHING) + counts


def utc_day(seconds: float) -> str:
    """2026-01-31"""
    return time.strftime("%Y-%m-%d", time.gmtime(seconds))
