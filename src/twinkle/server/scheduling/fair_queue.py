"""A queue shared fairly between tenants: the tenant that has used least for its weight goes first (:class:`Shares`).

A tenant's own requests keep their order. Higher priorities go before lower ones; but when a priority has waited while
``MAX_SKIPS`` requests in a row were taken from others, it gets the next turn.
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
    since: int  # breaks ties between tenants that have used the same amount: the lowest goes first
    items: OrderedDict[str, tuple[T, float]] = field(default_factory=OrderedDict)  # by key, each item with its cost


class FairQueue(Generic[T]):
    """A queue of items that tenants share: the next item is one of the tenant that has used least for its weight, among
    those of the priority whose turn it is.

    The time of each method grows with the number of tenants that have items, not with that of items.
    """

    def __init__(self, share_of: ShareOf = equal_shares) -> None:
        self._shares = Shares(share_of)
        self._tenants: dict[str, _Waiting[T]] = {}  # only tenants that have items
        self._skips: dict[Priority, int] = dict.fromkeys(Priority, 0)
        self._turns = 0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, tenant_id: str, key: str, item: T, cost: float = 1.0) -> None:
        """Add an item. ``key`` identifies it and must not be in the queue yet."""
        if tenant_id not in self._tenants:
            self._shares.enter(tenant_id)
            self._shares.raise_to_floor(tenant_id)
            self._tenants[tenant_id] = _Waiting(self._next_turn())
        self._tenants[tenant_id].items[key] = item, cost
        self._length += 1

    def pop(self, may: Callable[[str], bool] = _everybody) -> T | None:
        """Take the first item of the tenant whose turn it is; return None if there is none.

        Only tenants for which ``may`` returns True are considered.
        """
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
        """Return whether :meth:`pop` would return an item."""
        return any(map(may, self._tenants))

    def remove(self, tenant_id: str, key: str) -> bool:
        """Remove an item, and return whether it was in the queue."""
        waiting = self._tenants.get(tenant_id)
        if waiting is None or key not in waiting.items:
            return False
        del waiting.items[key]
        self._count_out(tenant_id)
        return True

    def _take_turn(self, priorities: KeysView[Priority]) -> Priority:
        """Return the highest priority, or, if some were skipped ``MAX_SKIPS`` times or more, the most skipped one."""
        overdue = [each for each in priorities if self._skips[each] >= MAX_SKIPS]
        chosen = max(overdue, key=lambda each: (self._skips[each], each)) if overdue else max(priorities)
        for each in priorities:
            self._skips[each] += 1
        self._skips[chosen] = 0
        return chosen

    def _count_out(self, tenant_id: str) -> None:
        """Note that an item has left the queue, and forget its tenant if it was the tenant's last."""
        self._length -= 1
        if not self._tenants[tenant_id].items:
            del self._tenants[tenant_id]
            self._shares.leave(tenant_id)

    def _next_turn(self) -> int:
        self._turns += 1
        return self._turns
