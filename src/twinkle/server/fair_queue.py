"""What waits, by tenant: tenants take turns, and a tenant's own requests keep their order."""

from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Nothing here costs more the more there is that waits."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, OrderedDict[str, T]] = OrderedDict()  # the next one first; none is empty
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, tenant_id: str, key: str, item: T) -> None:
        """``key`` is the item's own and not in the queue."""
        self._tenants.setdefault(tenant_id, OrderedDict())[key] = item
        self._length += 1

    def pop(self) -> T:
        """The first of the tenant that waited longest for its turn."""
        tenant_id, items = next(iter(self._tenants.items()))
        _, item = items.popitem(last=False)
        self._tenants.move_to_end(tenant_id)
        self._took_from(tenant_id, items)
        return item

    def remove(self, tenant_id: str, key: str) -> bool:
        """Whether it waited here."""
        items = self._tenants.get(tenant_id)
        if items is None or key not in items:
            return False
        del items[key]
        self._took_from(tenant_id, items)
        return True

    def _took_from(self, tenant_id: str, items: OrderedDict[str, T]) -> None:
        self._length -= 1
        if not items:
            del self._tenants[tenant_id]
