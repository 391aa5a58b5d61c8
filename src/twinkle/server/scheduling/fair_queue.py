"""What waits, by tenant: who got least for its weight goes first, and a tenant's own requests keep their order.

Higher priorities come before lower ones; but once ``MAX_SKIPS`` requests in a row went by a lower one, it gets a turn.
"""

from collections import OrderedDict
from collections.abc import Callable, KeysView
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from twinkle.server.scheduling.share import Priority, Standing

__all__ = ["MAX_SKIPS", "FairQueue"]

MAX_SKIPS = 8
_ABSENT = 1024  # tenants of whom nothing waits and who are remembered

T = TypeVar("T")


def _alike(_tenant_id: str) -> Standing:
    return Standing()


def _everybody(_tenant_id: str) -> bool:
    return True


@dataclass
class _Waiting(Generic[T]):
    items: OrderedDict[str, tuple[T, float]] = field(default_factory=OrderedDict)  # with their costs
    since: int = 0  # its place among those who got as much


class FairQueue(Generic[T]):
    """Nothing here costs more the more there is that waits, only the more tenants there are whose requests wait."""

    def __init__(self, standing: Callable[[str], Standing] = _alike) -> None:
        self._standing = standing
        self._tenants: dict[str, _Waiting[T]] = {}  # none is empty
        self._used: dict[str, float] = {}  # cost for weight, also of those who waited: coming back must not clear it
        self._absent: OrderedDict[str, None] = OrderedDict()  # of these, those who do not wait now; longest ago first
        self._floors: dict[Priority, float] = dict.fromkeys(Priority, 0.0)
        self._skips: dict[Priority, int] = dict.fromkeys(Priority, 0)
        self._turns = 0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, tenant_id: str, key: str, item: T, cost: float = 1.0) -> None:
        """``key`` is the item's own and not in the queue."""
        waiting = self._tenants.get(tenant_id)
        if waiting is None:  # idle time earns nothing
            floor = self._floors[self._standing(tenant_id).priority]
            self._used[tenant_id] = max(self._used.get(tenant_id, 0.0), floor)
            self._absent.pop(tenant_id, None)
            waiting = self._tenants[tenant_id] = _Waiting(since=self._next_turn())
        waiting.items[key] = item, cost
        self._length += 1

    def pop(self, may: Callable[[str], bool] = _everybody) -> T | None:
        """The first item of the tenant whose turn it is, among those who may; None if there is none."""
        by_priority: dict[Priority, list[str]] = {}
        for tenant_id in self._tenants:
            if may(tenant_id):
                by_priority.setdefault(self._standing(tenant_id).priority, []).append(tenant_id)
        if not by_priority:
            return None
        priority = self._take_turn(by_priority.keys())
        tenant_id = min(by_priority[priority], key=lambda each: (self._used[each], self._tenants[each].since))
        self._floors[priority] = max(self._floors[priority], self._used[tenant_id])
        return self._pop_from(tenant_id)

    def has(self, may: Callable[[str], bool] = _everybody) -> bool:
        """Whether :meth:`pop` would find something."""
        return any(may(tenant_id) for tenant_id in self._tenants)

    def remove(self, tenant_id: str, key: str) -> bool:
        """Whether it waited here."""
        waiting = self._tenants.get(tenant_id)
        if waiting is None or key not in waiting.items:
            return False
        del waiting.items[key]
        self._took_from(tenant_id)
        return True

    def _take_turn(self, priorities: KeysView[Priority]) -> Priority:
        """The highest, unless a lower one was passed over too often: then the one that was most often."""
        overdue = [each for each in priorities if self._skips[each] >= MAX_SKIPS]
        chosen = max(overdue, key=lambda each: (self._skips[each], each)) if overdue else max(priorities)
        for each in priorities:
            self._skips[each] += 1
        self._skips[chosen] = 0
        return chosen

    def _pop_from(self, tenant_id: str) -> T:
        waiting = self._tenants[tenant_id]
        _, (item, cost) = waiting.items.popitem(last=False)
        self._used[tenant_id] += cost / self._standing(tenant_id).weight
        waiting.since = self._next_turn()
        self._took_from(tenant_id)
        return item

    def _took_from(self, tenant_id: str) -> None:
        self._length -= 1
        if not self._tenants[tenant_id].items:
            del self._tenants[tenant_id]
            self._leave(tenant_id)

    def _leave(self, tenant_id: str) -> None:
        """What it used is forgotten where that changes nothing, or after many others."""
        self._absent[tenant_id] = None
        if self._used[tenant_id] <= self._floors[self._standing(tenant_id).priority]:
            del self._absent[tenant_id], self._used[tenant_id]
        while len(self._absent) > _ABSENT:
            del self._used[self._absent.popitem(last=False)[0]]

    def _next_turn(self) -> int:
        self._turns += 1
        return self._turns
