"""What each tenant has used: tokens, optimizer steps, requests.

An op, a sample or a pass of the base model is counted when it has succeeded.

Counts are kept twice. The totals since the process started are for monitoring. The counts of each tenant and day that
are not in the database yet are written there by maintenance, about every 15 seconds (see ``state.records.usage``), and
stay there. If the process is killed, the counts since the last write are lost.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import add

FORGOTTEN = ""  # not a tenant's id: the key for the sum over all tenants that are no longer counted one by one
_REMEMBERED = 10_000  # tenants; a server that accepts any API key may see an unlimited number of them


@dataclass(frozen=True)
class UsageCounts:
    """What a tenant used. ``trained_tokens`` are those of forward and forward_backward.

    ``prompt_tokens`` counts the prompt of a sampling request once, however many samples are drawn from it. ``requests``
    counts ops, sampling requests and passes of the base model.
    """

    trained_tokens: int = 0
    sampled_tokens: int = 0
    prompt_tokens: int = 0
    optim_steps: int = 0
    requests: int = 0

    def __add__(self, other: "UsageCounts") -> "UsageCounts":
        return UsageCounts(*map(add, vars(self).values(), vars(other).values()))  # both have the same order of fields


_NOTHING = UsageCounts()


class Usage:
    """The counters of one process: totals by tenant, and what is not in the database yet. Belongs to one event loop."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._totals: OrderedDict[str, UsageCounts] = OrderedDict()  # by tenant, least recently active first
        self._forgotten = _NOTHING
        self._unwritten: dict[tuple[str, str], UsageCounts] = {}  # by tenant and day

    def add(self, tenant_id: str, counts: UsageCounts) -> None:
        self._totals[tenant_id] = self._totals.get(tenant_id, _NOTHING) + counts
        self._totals.move_to_end(tenant_id)
        while len(self._totals) > _REMEMBERED:
            self._forgotten += self._totals.popitem(last=False)[1]
        self._add_unwritten((tenant_id, utc_day(self._clock())), counts)

    def totals(self) -> Mapping[str, UsageCounts]:
        """Return the counts since the process started, by tenant.

        Beyond 10,000 tenants, the sum over the least recently active ones stands under the key ``FORGOTTEN``.
        """
        return {**self._totals, FORGOTTEN: self._forgotten} if self._forgotten != _NOTHING else dict(self._totals)

    def take_unwritten(self) -> Mapping[tuple[str, str], UsageCounts]:
        """Return the counts since the last call, by tenant and day, and forget them.

        A caller that fails to write them to the database must pass them to :meth:`restore_unwritten`.
        """
        taken, self._unwritten = self._unwritten, {}
        return taken

    def restore_unwritten(self, counts: Mapping[tuple[str, str], UsageCounts]) -> None:
        """Take back counts that could not be written to the database."""
        for key, each in counts.items():
            self._add_unwritten(key, each)

    def _add_unwritten(self, key: tuple[str, str], counts: UsageCounts) -> None:
        self._unwritten[key] = self._unwritten.get(key, _NOTHING) + counts


def utc_day(seconds: float) -> str:
    """Return the UTC date of a time in seconds since the epoch, for example 2026-01-31."""
    return time.strftime("%Y-%m-%d", time.gmtime(seconds))
