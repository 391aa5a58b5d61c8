"""Which adapters are on the device. Those unused for longest wait in host memory, unseen by their tenants."""

from collections import Counter
from collections.abc import Iterable
from itertools import count

import torch

from twinkle.errors import AdapterExistsError, AdapterNotFoundError, CapacityError
from twinkle.model.adapter import STATE_BYTES_PER_PARAMETER, Adapter
from twinkle.model.stacks import SLOTS_PER_BLOCK, RowLayout, Stack

_HOST = torch.device("cpu")


class AdapterPool:
    """All adapters of a trainer; as many as ``budget_bytes`` allows are resident."""

    def __init__(self, budget_bytes: int, dtype: torch.dtype, device: torch.device) -> None:
        self.budget_bytes = budget_bytes
        self._dtype = dtype
        self._device = device
        self._adapters: dict[str, Adapter] = {}
        self._stacks: dict[str, Stack] = {}  # by the digest of their layout
        self._clock = count(1)

    def __contains__(self, adapter_id: str) -> bool:
        return adapter_id in self._adapters

    def ids(self) -> list[str]:
        return list(self._adapters)

    def get(self, adapter_id: str) -> Adapter:
        if adapter_id not in self._adapters:
            raise AdapterNotFoundError(adapter_id)
        return self._adapters[adapter_id]

    def stack_for(self, layout: RowLayout) -> Stack:
        if layout.digest not in self._stacks:
            self._stacks[layout.digest] = Stack(layout, self._dtype, self._device)
        return self._stacks[layout.digest]

    def add(self, adapter: Adapter) -> None:
        """Take in a new adapter; it starts in host memory and comes to the device when it is first used."""
        if adapter.adapter_id in self._adapters:
            raise AdapterExistsError(adapter.adapter_id)
        self.put(adapter)

    def put(self, adapter: Adapter) -> None:
        """Like :meth:`add`, in the place of any adapter with the same id."""
        if not self.fit([adapter]):
            needed = _bytes_of([adapter])
            raise CapacityError(
                f"adapter {adapter.adapter_id!r} needs {needed / 2**20:.0f} MiB on the device, "
                f"{self.budget_bytes / 2**20:.0f} MiB are set aside for adapters"
            )
        if adapter.adapter_id in self._adapters:
            self.remove(adapter.adapter_id)
        self._adapters[adapter.adapter_id] = adapter

    def remove(self, adapter_id: str) -> None:
        adapter = self.get(adapter_id)
        self._release(adapter)
        del self._adapters[adapter_id]

    def resident_ids(self) -> list[str]:
        return [adapter.adapter_id for adapter in self._adapters.values() if adapter.slot is not None]

    def fit(self, adapters: Iterable[Adapter]) -> bool:
        """Whether these adapters can be resident at the same time."""
        return _bytes_of(adapters) <= self.budget_bytes

    def make_resident(self, adapters: Iterable[Adapter]) -> None:
        """Bring all of these to the device, paging out others that were used least recently."""
        wanted = list(adapters)
        assert self.fit(wanted), "the planner must not ask for more adapters than fit"
        now = next(self._clock)
        for adapter in wanted:
            adapter.last_used = now
        if not self._try_make_resident(wanted):
            # Rows of the wanted adapters are scattered over half-empty blocks: start over with compact ones.
            for adapter in self._adapters.values():
                self._page_out(adapter)
            done = self._try_make_resident(wanted)
            assert done, "adapters that fit found no room in an empty device"

    def _try_make_resident(self, wanted: list[Adapter]) -> bool:
        keep = {adapter.adapter_id for adapter in wanted}
        for adapter in wanted:
            if adapter.slot is None and not self._make_room(adapter.stack, keep):
                return False
            if adapter.slot is None:
                adapter.slot = adapter.stack.take()
                adapter.move_state(self._device)
                adapter.refresh_compute_copy()
        return True

    def _make_room(self, stack: Stack, keep: set[str]) -> bool:
        state_bytes = STATE_BYTES_PER_PARAMETER * stack.layout.size
        while True:
            needed = state_bytes + (0 if stack.has_free_slot else stack.block_bytes)
            if self._used_bytes() + needed <= self.budget_bytes:
                if not stack.has_free_slot:
                    stack.add_block()
                return True
            idle = [a for a in self._adapters.values() if a.slot is not None and a.adapter_id not in keep]
            if not idle:
                return False
            self._page_out(min(idle, key=lambda a: a.last_used))

    def _page_out(self, adapter: Adapter) -> None:
        if adapter.slot is not None:
            self._release(adapter)
            adapter.move_state(_HOST)

    def _release(self, adapter: Adapter) -> None:
        if adapter.slot is not None:
            adapter.stack.give_back(adapter.slot)
            adapter.slot = None
            adapter.stack.drop_empty_blocks()

    def _used_bytes(self) -> int:
        blocks = sum(stack.allocated_bytes for stack in self._stacks.values())
        return blocks + sum(
            STATE_BYTES_PER_PARAMETER * a.layout.size for a in self._adapters.values() if a.slot is not None
        )


def _bytes_of(adapters: Iterable[Adapter]) -> int:
    counts = Counter(adapter.stack for adapter in adapters)
    return sum(
        -(-count // SLOTS_PER_BLOCK) * stack.block_bytes + count * STATE_BYTES_PER_PARAMETER * stack.layout.size
        for stack, count in counts.items()
    )
