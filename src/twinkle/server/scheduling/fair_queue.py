"""A queue shared fairly between tenants: the one that got least for its weight goes first (:class:`Shares`).

A tenant's own requests keep their order. Higher priorities come before lower ones; but once ``MAX_SKIPS`` requests in a
row were taken before a lower one, it gets a turn.
"""

from collections import OrderedDict
from collections.abc import Callable, KeysView
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from twinkle.server.scheduling.shares import Priority, ShareOf, Shares, equal_shares

MAX_SKIPS = 8

T = TypeVar("T")


def _everybody(_tenant_id: str) -> bool:
    return True


@dataclass
class _Waiting(Generic[T]):
    since: int  # the tenant's place among those who got as much
    items: OrderedDict[str, tuple[T, float]] = field(default_factory=OrderedDict)  # with their costs


class FairQueue(Generic[T]):
    """No method costs more the more items wait, only the more tenants have items that wait."""

    def __init__(self, share_of: ShareOf = equal_shares) -> None:
        self._shares = Shares(share_of)
        self._tenants: dict[str, _Waiting[T]] = {}  # none is empty
        self._skips: dict[Priority, int] = dict.fromkeys(Priority, 0)
        self._turns = 0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, tenant_id: str, key: str, item: T, cost: float = 1.0) -> None:
        """Add an item. ``key`` is the item's own and not in the queue."""
        if tenant_id not in self._tenants:
            self._shares.enter(tenant_id)
            self._shares.raise_to_floor(tenant_id)
            self._tenants[tenant_id] = _Waiting(self._next_turn())
        self._tenants[tenant_id].items[key] = item, cost
        self._length += 1

    def pop(self, may: Callable[[str], bool] = _everybody) -> T | None:
        """Take the first item of the tenant whose turn it is, among those who ``may``; None if there is none."""
        by_priority: dict[Priority, list[str]] = {}
        for tenant_id in filter(may, self._tenants):
            by_priority.setdefault(self._shares.priority(tenant_id), []).append(tenant_id)
        if not by_priority:
            return None
        candidates = by_priority[self._take_turn(by_priority.keys())]
        self._shares.raise_floors(candidates)
        tenant_id = min(candidates, key=lambda each: (self._shares.used(each), self._tenants[each].since))
        waiting = self._tenants[tenant_id]
        _, (item, cost) = waiting.items.popitem(last=False)
        self._shares.charge(tenant_id, cost)
        waiting.since = self._next_turn()
        self._count_out(tenant_id)
        return item

    def has_item(self, may: Callable[[str], bool] = _everybody) -> bool:
        """Return whether :meth:`pop` would find something."""
        return any(map(may, self._tenants))

    def remove(self, tenant_id: str, key: str) -> bool:
        """Take an item out, and return whether it waited here."""
        waiting = self._tenants.get(tenant_id)
        if waiting is None or key not in waiting.items:
            return False
        del waiting.items[key]
        self._count_out(tenant_id)
        return True

    def _take_turn(self, priorities: KeysView[Priority]) -> Priority:
        """Choose the highest, unless a lower one was passed over too often: then the one that was most often."""
        overdue = [each for each in priorities if self._skips[each] >= MAX_SKIPS]
        chosen = max(overdue, key=lambda each: (self._skips[each], each)) if overdue else max(priorities)
        for each in priorities:
            self._skips[each] += 1
        self._skips[chosen] = 0
        return chosen

    def _count_out(self, tenant_id: str) -> None:
        self._length -= 1
        if not self._tenants[tenant_id].items:
            del self._tenants[tenant_id]
            self._shares.leave(tenant_id)

    def _next_turn(self) -> int:
        self._turns += 1
        return self._turns
