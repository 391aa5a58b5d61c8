"""Fair shares: which of several tenants that wait for the same device goes next.

The scheduler of training ops and the queue of samples use the same rule. Of the tenants of one priority the one that
got least for its weight goes first. A tenant that had nothing to do starts again where the least served of its priority
is: idle time earns nothing. What a tenant got is remembered after it has left, because leaving and coming back must not
clear it; it is forgotten where that changes nothing, or after many others have left.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum

_ABSENT = 1024  # tenants that left and are remembered


class Priority(IntEnum):
    """Work of a higher class goes first, but for every few turns of it those below get one."""

    LOW = 0
    NORMAL = 1
    HIGH = 2


@dataclass(frozen=True)
class TenantShare:
    """``weight``: of two tenants of one class that always have work, one with twice the weight gets twice as much."""

    weight: float = 1.0
    priority: Priority = Priority.NORMAL


ShareOf = Callable[[str], TenantShare]


def equal_shares(_tenant_id: str) -> TenantShare:
    """Return the same share for every tenant."""
    return TenantShare()


class Shares:
    """What each tenant got for its weight, in any unit of cost."""

    def __init__(self, share_of: ShareOf = equal_shares) -> None:
        """``share_of`` may answer differently over time; the answer counts from then on."""
        self._share_of = share_of
        self._used: dict[str, float] = {}  # cost for weight, plus what a tenant was raised by for idle times
        self._absent: OrderedDict[str, None] = OrderedDict()  # of these, the tenants that left; longest ago first
        # By priority, the smallest use of a tenant with work when the next to be served was last chosen.
        self._floors: dict[Priority, float] = dict.fromkeys(Priority, 0.0)

    def weight(self, tenant_id: str) -> float:
        return self._share_of(tenant_id).weight

    def priority(self, tenant_id: str) -> Priority:
        return self._share_of(tenant_id).priority

    def used(self, tenant_id: str) -> float:
        return self._used.get(tenant_id, 0.0)

    def place(self, tenant_id: str) -> tuple[int, float]:
        """Return the tenant's place among those with work: the smallest goes first."""
        return -self.priority(tenant_id), self.used(tenant_id)

    def enter(self, tenant_id: str) -> None:
        """Note that the tenant is here; the opposite of :meth:`leave`."""
        self._absent.pop(tenant_id, None)

    def raise_to_floor(self, tenant_id: str) -> None:
        """Raise the use of a tenant that had no work until now: idle time earns nothing."""
        self._used[tenant_id] = max(self.used(tenant_id), self._floors[self.priority(tenant_id)])

    def raise_floors(self, with_work: Iterable[str]) -> None:
        """Raise the floor of each priority to the least use of its tenants that have work."""
        least: dict[Priority, float] = {}
        for tenant_id in with_work:
            priority, used = self.priority(tenant_id), self.used(tenant_id)
            least[priority] = min(used, least.get(priority, used))
        for priority, used in least.items():
            self._floors[priority] = max(self._floors[priority], used)

    def charge(self, tenant_id: str, cost: float) -> None:
        self._used[tenant_id] = self.used(tenant_id) + cost / self.weight(tenant_id)

    def leave(self, tenant_id: str) -> list[str]:
        """Note that the tenant has nothing here any more; return the tenants that are forgotten by that."""
        forgotten = []
        if self.used(tenant_id) <= self._floors[self.priority(tenant_id)]:  # where it would start again in any case
            forgotten.append(tenant_id)
        else:
            self._absent[tenant_id] = None
            while len(self._absent) > _ABSENT:
                forgotten.append(self._absent.popitem(last=False)[0])
        for each in forgotten:
            self._used.pop(each, None)
        return forgotten
