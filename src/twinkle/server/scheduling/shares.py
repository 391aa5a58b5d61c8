"""Fair shares: which of several tenants that wait for the same device goes next.

The scheduler of training ops and the queue of samples use the same rule. Among the tenants of one priority, the one
that has used least for its weight goes first. A tenant that had no work for a while continues at the level of the least
served tenant of its priority (the floor): idle time does not add up to a claim. What a tenant has used is remembered
after it has left, because leaving and coming back must not reset it. It is forgotten when it is not above the floor,
where it makes no difference, or after many other tenants have left.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum

_ABSENT = 1024  # the most tenants that have left and are remembered


class Priority(IntEnum):
    """The priority of a tenant's work. Higher priorities go first, but lower ones get a turn every few turns."""

    LOW = 0
    NORMAL = 1
    HIGH = 2


@dataclass(frozen=True)
class TenantShare:
    """A tenant's weight and priority. Of two tenants with the same priority that always have work, the one with twice
    the weight gets twice as much of the device.
    """

    weight: float = 1.0
    priority: Priority = Priority.NORMAL


ShareOf = Callable[[str], TenantShare]


def equal_shares(_tenant_id: str) -> TenantShare:
    """Return the same share for every tenant."""
    return TenantShare()


class Shares:
    """What each tenant has used, as cost divided by weight. The unit of cost is the caller's."""

    def __init__(self, share_of: ShareOf = equal_shares) -> None:
        """``share_of`` returns a tenant's share; if it returns another one later, that applies from then on."""
        self._share_of = share_of
        self._used: dict[str, float] = {}  # sum of cost / weight, plus what raise_to_floor added for idle times
        self._absent: OrderedDict[str, None] = OrderedDict()  # tenants in _used that have left; longest ago first
        # By priority: the smallest use among the tenants with work, when a tenant was last chosen.
        self._floors: dict[Priority, float] = dict.fromkeys(Priority, 0.0)

    def weight(self, tenant_id: str) -> float:
        return self._share_of(tenant_id).weight

    def priority(self, tenant_id: str) -> Priority:
        return self._share_of(tenant_id).priority

    def used(self, tenant_id: str) -> float:
        return self._used.get(tenant_id, 0.0)

    def place(self, tenant_id: str) -> tuple[int, float]:
        """Return the sort key of the tenant among those with work: the smallest goes first."""
        return -self.priority(tenant_id), self.used(tenant_id)

    def enter(self, tenant_id: str) -> None:
        """Note that the tenant is present. The opposite of :meth:`leave`."""
        self._absent.pop(tenant_id, None)

    def raise_to_floor(self, tenant_id: str) -> None:
        """Raise the use of a tenant that had no work until now to the floor, so that idle time gives it no claim."""
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
        """Add a cost to the tenant's use."""
        self._used[tenant_id] = self.used(tenant_id) + cost / self.weight(tenant_id)

    def leave(self, tenant_id: str) -> list[str]:
        """Note that the tenant has left; return the tenants whose use is forgotten now, possibly this one."""
        forgotten = []
        if self.used(tenant_id) <= self._floors[self.priority(tenant_id)]:  # coming back, it would start there anyway
            forgotten.append(tenant_id)
        else:
            self._absent[tenant_id] = None
            while len(self._absent) > _ABSENT:
                forgotten.append(self._absent.popitem(last=False)[0])
        for each in forgotten:
            self._used.pop(each, None)
        return forgotten
